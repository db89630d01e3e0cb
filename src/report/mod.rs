//! Pages for people: one self-contained HTML file each, without a script or a network.
//!
//! Architecture invariant: a page is made of strings it is given; nothing here knows what they
//! mean or where they go.

pub mod plot;

use std::fmt::{Display, Write};

/// What stands on a page, from its top.
#[derive(Debug, Default)]
pub struct Page {
    body: String,
}

/// A figure in large type.
#[derive(Clone, Debug)]
pub struct Tile {
    pub label: String,
    pub value: String,
    pub note: String,
}

/// A bar as long as `share` of the widest.
#[derive(Clone, Debug)]
pub struct Bar {
    pub label: String,
    pub share: f64,
    pub value: String,
}

/// A table's column: its head, and whether its cells lean right.
pub type Column<'a> = (&'a str, bool);

impl Page {
    pub fn new(title: &str, lead: &str) -> Page {
        let mut page = Page::default();
        page.push(&format!(
            "<header><h1>{}</h1><p>{}</p></header>\n",
            escape(title),
            escape(lead)
        ));
        page
    }

    pub fn section(&mut self, title: &str) {
        self.push(&format!("<h2>{}</h2>\n", escape(title)));
    }

    pub fn text(&mut self, text: &str) {
        self.push(&format!("<p>{}</p>\n", escape(text)));
    }

    pub fn note(&mut self, text: &str) {
        self.push(&format!("<p class=\"note\">{}</p>\n", escape(text)));
    }

    pub fn alarm(&mut self, name: &str, text: &str) {
        let (name, text) = (escape(name), escape(text));
        self.push(&format!(
            "<div class=\"alarm\"><b>{name}</b> {text}</div>\n"
        ));
    }

    pub fn fine(&mut self, text: &str) {
        self.push(&format!("<p class=\"fine\">{}</p>\n", escape(text)));
    }

    pub fn tiles(&mut self, tiles: &[Tile]) {
        self.push("<div class=\"tiles\">\n");
        for tile in tiles {
            self.push(&format!(
                "<div class=\"tile\"><span>{}</span><b>{}</b><small>{}</small></div>\n",
                escape(&tile.label),
                escape(&tile.value),
                escape(&tile.note)
            ));
        }
        self.push("</div>\n");
    }

    /// Plots side by side where there is room: SVG and what it shows.
    pub fn figures(&mut self, figures: &[(String, String)]) {
        self.push("<div class=\"figures\">\n");
        for (svg, caption) in figures {
            self.push(&format!(
                "<figure role=\"img\" aria-label=\"{0}\">{svg}<figcaption>{0}</figcaption></figure>\n",
                escape(caption)
            ));
        }
        self.push("</div>\n");
    }

    pub fn bars(&mut self, bars: &[Bar]) {
        let html = bars_html(bars);
        self.push(&html);
    }

    /// How far `achieved` and `ceiling` come, as shares of the whole, with what each is.
    pub fn gauge(&mut self, [achieved, ceiling]: [f64; 2], keys: [&str; 3]) {
        let percent = |share: f64| 100.0 * share.clamp(0.0, 1.0);
        self.push(&format!(
            "<div class=\"gauge\" role=\"img\" aria-label=\"{}\"><div class=\"ceiling\" style=\"width:{:.1}%\"></div><div class=\"achieved\" style=\"width:{:.1}%\"></div></div>\n",
            escape(keys.join(", ")),
            percent(ceiling),
            percent(achieved)
        ));
        self.push("<div class=\"key\">");
        for (key, colour) in keys.iter().zip(["main", "soft", "line"]) {
            self.push(&format!(
                "<span><i style=\"background:var(--{colour})\"></i>{}</span>",
                escape(key)
            ));
        }
        self.push("</div>\n");
    }

    /// `chosen` is the row that stands out.
    pub fn table(&mut self, columns: &[Column], rows: &[Vec<String>], chosen: Option<usize>) {
        let cell = |tag: &str, text: &str, right: bool| {
            let class = if right { " class=\"right\"" } else { "" };
            format!("<{tag}{class}>{}</{tag}>", escape(text))
        };
        let heads = columns.iter().map(|(name, right)| cell("th", name, *right));
        self.push(&format!(
            "<table><thead><tr>{}</tr></thead><tbody>\n",
            heads.collect::<String>()
        ));
        for (at, row) in rows.iter().enumerate() {
            let cells = row.iter().zip(columns);
            let cells: String = cells
                .map(|(text, (_, right))| cell("td", text, *right))
                .collect();
            let class = if chosen == Some(at) {
                " class=\"chosen\""
            } else {
                ""
            };
            self.push(&format!("<tr{class}>{cells}</tr>\n"));
        }
        self.push("</tbody></table>\n");
    }

    /// Decoded rows: what stands before, the token that follows, bars for what the teacher thinks.
    pub fn rows(&mut self, rows: &[DecodedRow]) {
        self.push("<div class=\"rows\">\n");
        for row in rows {
            self.push(&format!(
                "<div class=\"row\"><h3>{}</h3><div class=\"text\"><div>{}<mark>{}</mark></div></div>{}<p class=\"note\">{}</p></div>\n",
                escape(&row.title),
                escape(&row.context),
                escape(&row.target),
                bars_html(&row.best),
                escape(&row.note)
            ));
        }
        self.push("</div>\n");
    }

    pub fn facts(&mut self, facts: &[(String, String)]) {
        self.push("<dl>\n");
        for (name, value) in facts {
            self.push(&format!(
                "<dt>{}</dt><dd>{}</dd>\n",
                escape(name),
                escape(value)
            ));
        }
        self.push("</dl>\n");
    }

    /// The whole file.
    pub fn finish(self, title: &str) -> String {
        format!(
            "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<meta name=\"color-scheme\" content=\"light dark\">\n<link rel=\"icon\" href=\"data:,\">\n<title>{}</title>\n<style>\n{}</style>\n</head>\n<body>\n{}</body>\n</html>\n",
            escape(title),
            include_str!("style.css"),
            self.body
        )
    }

    fn push(&mut self, html: &str) {
        self.body.push_str(html);
    }
}

/// A scored position as a person reads it.
#[derive(Clone, Debug)]
pub struct DecodedRow {
    pub title: String,
    pub context: String,
    pub target: String,
    pub best: Vec<Bar>,
    pub note: String,
}

fn bars_html(bars: &[Bar]) -> String {
    let widest = bars.iter().map(|bar| bar.share).fold(1e-12, f64::max);
    let mut html = "<div class=\"bars\">\n".to_owned();
    for bar in bars {
        let _ = writeln!(
            html,
            "<i>{}</i><b>{}</b><div class=\"bar\" style=\"width:{:.1}%\"></div>",
            escape(&bar.label),
            escape(&bar.value),
            100.0 * (bar.share / widest).clamp(0.0, 1.0)
        );
    }
    html + "</div>\n"
}

/// Text as it may stand in HTML, in attributes too.
pub fn escape(text: impl Display) -> String {
    let mut escaped = String::new();
    for c in text.to_string().chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            // Not allowed in HTML, even as references.
            c if c.is_control() && !matches!(c, '\n' | '\t') => escaped.push('\u{fffd}'),
            c => escaped.push(c),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_is_shown_becomes_markup() {
        assert_eq!(
            escape("<b a=\"1\" c='2'>&\u{0}"),
            "&lt;b a=&quot;1&quot; c=&#39;2&#39;&gt;&amp;\u{fffd}"
        );
        let mut page = Page::new("<t>", "<lead>");
        page.rows(&[DecodedRow {
            title: "<x>".into(),
            context: "<script>alert(1)</script>".into(),
            target: "</mark>".into(),
            best: vec![Bar {
                label: "<i>".into(),
                share: 0.5,
                value: "50 %".into(),
            }],
            note: "&".into(),
        }]);
        let html = page.finish("t");
        for tag in ["<script", "<x>", "<t>", "</mark></mark>", "<lead>"] {
            assert!(!html.contains(tag), "{tag}");
        }
        assert!(!html.contains("http"), "nothing is fetched");
    }
}
