//! Plots as SVG, in the colours of the page around them, light or dark.

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::coord::ranged1d::ValueFormatter;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

/// Drawn at this size and scaled to the width there is, so that type stays readable on a phone.
const SIZE: (u32, u32) = (440, 270);
const TYPE_PX: u32 = 15;

/// Colours that stand for the page's own: no plot uses these for themselves.
const INK: RGBColor = RGBColor(1, 0, 0);
const LINE: RGBColor = RGBColor(2, 0, 0);
const MAIN: RGBColor = RGBColor(3, 0, 0);
const SECOND: RGBColor = RGBColor(4, 0, 0);
const PAGE_COLOURS: [(&str, &str); 4] = [
    ("#010000", "var(--ink)"),
    ("#020000", "var(--line)"),
    ("#030000", "var(--main)"),
    ("#040000", "var(--second)"),
];

/// How a figure on an axis is written.
pub type Format = fn(&f64) -> String;

/// What the axes say.
#[derive(Clone, Copy, Debug)]
pub struct Axes<'a> {
    pub x: &'a str,
    pub y: &'a str,
    pub x_format: Format,
    pub y_format: Format,
}

/// A curve over k, both axes by powers, with the point that was chosen.
#[derive(Clone, Debug)]
pub struct Curve<'a> {
    pub axes: Axes<'a>,
    /// (x, y), x rising, all above 0.
    pub points: &'a [(f64, f64)],
    /// A point of the curve, and what it is called.
    pub chosen: Option<((f64, f64), String)>,
    /// A line across, and what it is called.
    pub bound: Option<(f64, String)>,
}

/// # Errors
/// A plot that can't be drawn.
pub fn curve(curve: &Curve) -> Result<String> {
    let (x, y) = (
        extent(curve.points.iter().map(|p| p.0)),
        extent(curve.points.iter().map(|p| p.1)),
    );
    let low = curve.bound.as_ref().map_or(y.0, |bound| y.0.min(bound.0));
    let y = (low / 1.5, y.1 * 1.5);
    draw(|area| {
        let mut chart = ChartBuilder::on(area)
            .margin(6)
            .margin_right(18)
            .x_label_area_size(44)
            .y_label_area_size(70)
            .build_cartesian_2d((x.0..x.1 * 1.05).log_scale(), (y.0..y.1).log_scale())?;
        mesh(&mut chart, &curve.axes)?;
        if let Some((bound, name)) = &curve.bound {
            chart.draw_series(LineSeries::new(
                [(x.0, *bound), (x.1, *bound)],
                SECOND.stroke_width(1),
            ))?;
            chart.draw_series([Text::new(
                name.clone(),
                (x.0 * 1.06, bound * 1.05),
                label(SECOND).pos(at_left_above()),
            )])?;
        }
        chart.draw_series(LineSeries::new(
            curve.points.iter().copied(),
            MAIN.stroke_width(2),
        ))?;
        if let Some((point, name)) = &curve.chosen {
            let (at, side) = beside(*point, x);
            chart.draw_series([Circle::new(*point, 5, SECOND.filled())])?;
            chart.draw_series([Text::new(name.clone(), at, label(SECOND).pos(side))])?;
        }
        Ok(())
    })
}

/// Bars over a range cut evenly. `x` is the axis's own range.
///
/// # Errors
/// A plot that can't be drawn.
pub fn histogram(axes: &Axes, x: (f64, f64), counts: &[u64]) -> Result<String> {
    let most = counts.iter().copied().max().unwrap_or(0).max(1) as f64;
    let width = (x.1 - x.0) / counts.len().max(1) as f64;
    draw(|area| {
        let mut chart = ChartBuilder::on(area)
            .margin(6)
            .margin_right(18)
            .x_label_area_size(44)
            .y_label_area_size(70)
            .build_cartesian_2d(x.0..x.1, 0.0..most * 1.06)?;
        mesh(&mut chart, axes)?;
        let bars = counts.iter().enumerate().map(|(i, &count)| {
            let left = x.0 + width * i as f64;
            Rectangle::new(
                [
                    (left + 0.08 * width, 0.0),
                    (left + 0.92 * width, count as f64),
                ],
                MAIN.filled(),
            )
        });
        chart.draw_series(bars)?;
        Ok(())
    })
}

/// Points joined, at whole x, with the chosen one.
///
/// # Errors
/// A plot that can't be drawn.
pub fn steps(axes: &Axes, points: &[(f64, f64)], chosen: Option<f64>) -> Result<String> {
    let (x, y) = (
        extent(points.iter().map(|p| p.0)),
        extent(points.iter().map(|p| p.1)),
    );
    draw(|area| {
        let mut chart = ChartBuilder::on(area)
            .margin(6)
            .margin_right(18)
            .x_label_area_size(44)
            .y_label_area_size(70)
            .build_cartesian_2d(x.0 - 0.3..x.1 + 0.3, 0.0..y.1 * 1.1)?;
        mesh(&mut chart, axes)?;
        chart.draw_series(LineSeries::new(
            points.iter().copied(),
            MAIN.stroke_width(2),
        ))?;
        chart.draw_series(points.iter().map(|point| match chosen == Some(point.0) {
            true => Circle::new(*point, 6, SECOND.filled()),
            false => Circle::new(*point, 4, MAIN.filled()),
        }))?;
        Ok(())
    })
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type DrawResult = std::result::Result<(), DrawingAreaErrorKind<std::io::Error>>;

fn draw(paint: impl FnOnce(&Area) -> DrawResult) -> Result<String> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        paint(&area)
            .and_then(|()| area.present())
            .map_err(|e| anyhow!("a plot can't be drawn: {e}"))?;
    }
    for (stand_in, colour) in PAGE_COLOURS {
        svg = svg.replace(stand_in, colour);
    }
    let (width, height) = SIZE;
    let fixed = format!("<svg width=\"{width}\" height=\"{height}\" ");
    // Inside a page SVG needs no namespace, and the page names no address.
    let svg = svg.replace(" xmlns=\"http://www.w3.org/2000/svg\"", "");
    Ok(svg.replace(&fixed, "<svg aria-hidden=\"true\" "))
}

fn label<'a>(colour: RGBColor) -> TextStyle<'a> {
    ("sans-serif", TYPE_PX).into_font().color(&colour)
}

fn at_left_above() -> Pos {
    Pos::new(HPos::Left, VPos::Bottom)
}

/// Where text beside a point of a falling curve stands free: above to the right, or, near the
/// right edge, below to the left.
fn beside(point: (f64, f64), x: (f64, f64)) -> ((f64, f64), Pos) {
    let near_edge = (point.0 / x.0).ln() > 0.6 * (x.1 / x.0).ln();
    match near_edge {
        true => (
            (point.0 / 1.12, point.1 / 1.12),
            Pos::new(HPos::Right, VPos::Top),
        ),
        false => (
            (point.0 * 1.12, point.1 * 1.12),
            Pos::new(HPos::Left, VPos::Bottom),
        ),
    }
}

fn mesh<'a, X, Y>(
    chart: &mut ChartContext<'a, SVGBackend<'a>, Cartesian2d<X, Y>>,
    axes: &Axes,
) -> DrawResult
where
    X: Ranged<ValueType = f64> + ValueFormatter<f64>,
    Y: Ranged<ValueType = f64> + ValueFormatter<f64>,
{
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(LINE)
        .axis_style(LINE)
        .label_style(label(INK))
        .axis_desc_style(label(INK))
        .x_labels(7)
        .y_labels(5)
        .x_desc(axes.x)
        .y_desc(axes.y)
        .x_label_formatter(&axes.x_format)
        .y_label_formatter(&axes.y_format)
        .draw()
}

fn extent(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let (low, high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| {
        (low.min(v), high.max(v))
    });
    match low < high {
        true => (low, high),
        false if low.is_finite() => (low * 0.9, low * 1.1 + 1e-9),
        false => (1.0, 10.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AXES: Axes = Axes {
        x: "k",
        y: "tail",
        x_format: |v| format!("{v}"),
        y_format: |v| format!("{v}"),
    };

    #[test]
    fn plots_take_their_colours_from_the_page() {
        let points: Vec<(f64, f64)> = (1..257)
            .map(|k| (f64::from(k), 1.0 / f64::from(k)))
            .collect();
        let drawn = curve(&Curve {
            axes: AXES,
            points: &points,
            chosen: Some((points[31], "k = 32".into())),
            bound: Some((0.01, "1 %".into())),
        })
        .unwrap();
        assert!(drawn.contains("var(--main)") && drawn.contains("k = 32"));
        assert!(
            !drawn.contains("#0") && !drawn.contains("width=\"440\""),
            "{drawn}"
        );
    }

    #[test]
    fn nothing_and_one_value_can_be_drawn() {
        for counts in [&[][..], &[0], &[3, 0]] {
            histogram(&AXES, (0.0, 1.0), counts).unwrap();
        }
        for points in [&[][..], &[(0.0, 3.0)], &[(0.0, 3.0), (1.0, 3.0)]] {
            steps(&AXES, points, Some(0.0)).unwrap();
        }
    }
}
