//! How results are laid out for people: aligned tables and figures with units.

use unicode_width::UnicodeWidthStr;

use crate::products::Product;
use crate::store::job::Terms;

/// Which side of its column a cell leans to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Align {
    Left,
    Right,
}

/// Rows of cells under a header, every column as wide as its widest cell.
pub fn table(columns: &[(&str, Align)], rows: &[Vec<String>]) -> String {
    let widths: Vec<usize> = columns
        .iter()
        .enumerate()
        .map(|(i, (name, _))| {
            let cells = rows.iter().map(|row| row[i].width());
            cells.max().unwrap_or(0).max(name.width())
        })
        .collect();
    let line = |cells: Vec<&str>| {
        let mut text = String::new();
        for (i, cell) in cells.iter().enumerate() {
            let pad = " ".repeat(widths[i] - cell.width());
            let (before, after) = match columns[i].1 {
                Align::Left => (String::new(), pad),
                Align::Right => (pad, String::new()),
            };
            text += &format!("{before}{cell}{after}  ");
        }
        text.trim_end().to_owned() + "\n"
    };
    let mut text = line(columns.iter().map(|(name, _)| *name).collect());
    let rule: Vec<String> = widths.iter().map(|w| "─".repeat(*w)).collect();
    text += &line(rule.iter().map(String::as_str).collect());
    for row in rows {
        text += &line(row.iter().map(String::as_str).collect());
    }
    text
}

/// Facts one under another, names aligned.
pub fn facts(facts: &[(&str, String)]) -> String {
    let width = facts
        .iter()
        .map(|(name, _)| name.width())
        .max()
        .unwrap_or(0);
    let lines = facts.iter().map(|(name, value)| {
        let pad = " ".repeat(width - name.width());
        format!("{name}{pad}  {value}\n")
    });
    lines.collect()
}

/// What a mean target log-prob that stands without `target_logp` leaves open.
pub fn target_logp_note(terms: &Terms) -> String {
    let is_exact = terms.products.iter().any(|p| p.0 == Product::TargetLogp);
    match is_exact {
        true => String::new(),
        false => format!(
            " (a target outside the top {} counts an even share of the tail; exact with --emit target_logp)",
            terms.k
        ),
    }
}

/// "1 shard", "2 shards".
pub fn plural(n: usize, noun: &str) -> String {
    let s = if n == 1 { "" } else { "s" };
    format!("{} {noun}{s}", count(n as u64))
}

/// 1234567 as "1,234,567".
pub fn count(n: u64) -> String {
    indicatif::HumanCount(n).to_string()
}

/// Bytes with a binary unit.
pub fn bytes(n: u64) -> String {
    indicatif::BinaryBytes(n).to_string()
}

/// Three digits and a decimal prefix: 118800000000.0 bytes as "119 GB".
pub fn si(value: f64, unit: &str) -> String {
    const PREFIXES: [(f64, &str); 7] = [
        (1e18, "E"),
        (1e15, "P"),
        (1e12, "T"),
        (1e9, "G"),
        (1e6, "M"),
        (1e3, "k"),
        (1.0, ""),
    ];
    // 999.9 of a unit rounds to 1,000 and belongs to the next.
    let fits = |(factor, _): &&(f64, &str)| value.abs() >= factor * 0.9995;
    let (factor, prefix) = PREFIXES.iter().find(fits).unwrap_or(&PREFIXES[6]);
    let text = format!("{} {prefix}{unit}", figure(value / factor));
    text.trim_end().to_owned()
}

/// A number of parameters as people say it: "70.6 B".
pub fn billions(n: u64) -> String {
    si(n as f64, "").replace('G', "B")
}

/// A number with three digits that count, or all before the point.
pub fn figure(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        v if v >= 1000.0 => count(value.round() as u64),
        v if v >= 99.95 => format!("{value:.0}"),
        v if v >= 9.995 => format!("{value:.1}"),
        v if v >= 0.01 => format!("{value:.2}"),
        _ => format!("{value:.2e}"),
    }
}

/// Seconds as people say them.
pub fn duration(seconds: f64) -> String {
    match seconds {
        s if s >= 48.0 * 3600.0 => format!("{} hours", figure(s / 3600.0)),
        s if s >= 3600.0 => format!("{:.1} hours", s / 3600.0),
        s if s >= 90.0 => format!("{:.1} min", s / 60.0),
        s if s >= 9.95 => format!("{s:.1} s"),
        s if s >= 0.995 => format!("{s:.2} s"),
        s => format!("{:.0} ms", 1000.0 * s),
    }
}

/// The end of `text`, at most `width` columns wide, with … for what is left out before it.
pub fn tail_of(text: &str, width: usize) -> String {
    if text.width() <= width {
        return text.to_owned();
    }
    let mut kept = String::new();
    for c in text.chars().rev() {
        let longer = format!("{c}{kept}");
        if longer.width() + 1 > width {
            break;
        }
        kept = longer;
    }
    format!("…{kept}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_whatever_the_script() {
        let rows = vec![
            vec!["日本".to_owned(), "1".to_owned()],
            vec!["é".to_owned(), "22".to_owned()],
        ];
        let text = table(&[("a", Align::Left), ("n", Align::Right)], &rows);
        assert_eq!(text, "a      n\n────  ──\n日本   1\né     22\n");
    }

    #[test]
    fn figures_have_three_digits() {
        let shown = [118.8e9, 999.9e9, 1.4e20, 198.0, 0.5].map(|v| si(v, "B"));
        assert_eq!(shown, ["119 GB", "1.00 TB", "140 EB", "198 B", "0.50 B"]);
        assert_eq!(si(70.6e9, ""), "70.6 G");
        let shown = [98.25, 4096.4, 0.00012].map(figure);
        assert_eq!(shown, ["98.2", "4,096", "1.20e-4"]);
    }

    #[test]
    fn tails_are_never_wider_than_asked() {
        assert_eq!(tail_of("abc", 3), "abc");
        assert_eq!(tail_of("abcdef", 4), "…def");
        assert_eq!(tail_of("日本語", 4), "…語");
    }
}
