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
    fn tails_are_never_wider_than_asked() {
        assert_eq!(tail_of("abc", 3), "abc");
        assert_eq!(tail_of("abcdef", 4), "…def");
        assert_eq!(tail_of("日本語", 4), "…語");
    }
}
