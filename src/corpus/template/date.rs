//! The fixed date that `strftime_now` prints.

/// A day, at midnight.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TemplateDate {
    year: i32,
    month: u32,
    day: u32,
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = [
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
];

impl TemplateDate {
    /// `YYYY-MM-DD`
    pub fn parse(text: &str) -> Option<TemplateDate> {
        let mut parts = text.split('-');
        let mut part = |digits: usize| {
            let part = parts.next().filter(|p| p.len() == digits)?;
            part.bytes()
                .all(|b| b.is_ascii_digit())
                .then(|| part.parse::<u32>().ok())?
        };
        let (year, month, day) = (part(4)?, part(2)?, part(2)?);
        let date = TemplateDate {
            year: year as i32,
            month,
            day,
        };
        let fits =
            year > 0 && (1..=12).contains(&month) && (1..=date.days_in(month)).contains(&day);
        (fits && parts.next().is_none()).then_some(date)
    }

    /// `strftime` in the C locale.
    ///
    /// # Errors
    /// A directive that is not a part of the date or time.
    pub fn format(&self, format: &str) -> Result<String, String> {
        let mut out = String::new();
        let mut chars = format.chars();
        while let Some(c) = chars.next() {
            if c != '%' {
                out.push(c);
                continue;
            }
            match chars.next() {
                Some('-') => {
                    let directive = chars.next().unwrap_or('%');
                    let text = self.directive(directive)?;
                    let bare = text.trim_start_matches('0');
                    out.push_str(if bare.is_empty() { "0" } else { bare });
                }
                Some(directive) => out.push_str(&self.directive(directive)?),
                None => out.push('%'),
            }
        }
        Ok(out)
    }

    fn directive(&self, directive: char) -> Result<String, String> {
        let (year, month, day) = (self.year, self.month, self.day);
        let (month_name, day_name) = (MONTHS[month as usize - 1], DAYS[self.weekday() as usize]);
        Ok(match directive {
            '%' => "%".to_owned(),
            'Y' => year.to_string(),
            'y' => format!("{:02}", year % 100),
            'm' => format!("{month:02}"),
            'd' => format!("{day:02}"),
            'e' => format!("{day:2}"),
            'B' => month_name.to_owned(),
            'b' | 'h' => month_name[..3].to_owned(),
            'A' => day_name.to_owned(),
            'a' => day_name[..3].to_owned(),
            'j' => format!("{:03}", self.day_of_year()),
            'F' => format!("{year}-{month:02}-{day:02}"),
            'D' => format!("{month:02}/{day:02}/{:02}", year % 100),
            'H' | 'M' | 'S' => "00".to_owned(),
            'I' => "12".to_owned(),
            'p' => "AM".to_owned(),
            'T' => "00:00:00".to_owned(),
            'R' => "00:00".to_owned(),
            other => return Err(format!("strftime_now: %{other} is not known here")),
        })
    }

    fn days_in(&self, month: u32) -> u32 {
        let leap = (self.year % 4 == 0 && self.year % 100 != 0) || self.year % 400 == 0;
        match month {
            2 => 28 + u32::from(leap),
            4 | 6 | 9 | 11 => 30,
            _ => 31,
        }
    }

    fn day_of_year(&self) -> u32 {
        (1..self.month).map(|m| self.days_in(m)).sum::<u32>() + self.day
    }

    /// 0 is Sunday.
    fn weekday(&self) -> u32 {
        let before = self.year as u32 - 1;
        (before + before / 4 - before / 100 + before / 400 + self.day_of_year()) % 7
    }
}

impl std::fmt::Display for TemplateDate {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "{:04}-{:02}-{:02}", self.year, self.month, self.day)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_print_as_strftime_does() {
        let date = TemplateDate::parse("2024-07-06").unwrap();
        assert_eq!(
            date.format("%d %b %Y, %A %B %-d %y %m %j %H:%M 100%%"),
            Ok("06 Jul 2024, Saturday July 6 24 07 188 00:00 100%".into())
        );
        assert_eq!(
            TemplateDate::parse("2000-02-29").unwrap().format("%a %F"),
            Ok("Tue 2000-02-29".into())
        );
        assert!(date.format("%Q").is_err());
        for wrong in [
            "2023-02-29",
            "2024-13-01",
            "24-1-1",
            "2024-01-01-",
            "",
            "2024-01-+1",
        ] {
            assert_eq!(TemplateDate::parse(wrong), None, "{wrong}");
        }
    }
}
