//! The only code that draws: progress and notes on stderr, so that stdout stays the result.

use std::io::IsTerminal;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use indicatif::{HumanCount, HumanDuration, ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Between two lines of progress when stderr is a file or a pipe.
const PLAIN_INTERVAL: Duration = Duration::from_secs(10);

/// Whether nothing is drawn; set once, before any work.
static QUIET: AtomicBool = AtomicBool::new(false);

/// Draws nothing from now on.
pub fn be_quiet() {
    QUIET.store(true, Ordering::Relaxed);
}

fn is_quiet() -> bool {
    QUIET.load(Ordering::Relaxed)
}

/// Progress over a known amount of work, with rate and time left. On a terminal a bar; elsewhere
/// a line every few seconds.
#[derive(Debug)]
pub struct Progress {
    bar: ProgressBar,
    label: &'static str,
    unit: &'static str,
    started: Instant,
    /// Work done before this run started, left out of the rate.
    already: u64,
    plain: Option<Mutex<Instant>>,
}

impl Progress {
    /// `label` says what is done ("scoring"), `unit` what is counted ("rows").
    pub fn new(label: &'static str, unit: &'static str, total: u64, already: u64) -> Progress {
        let terminal = std::io::stderr().is_terminal();
        let (draws, lines) = (terminal && !is_quiet(), !terminal && !is_quiet());
        let target = if draws {
            ProgressDrawTarget::stderr_with_hz(5)
        } else {
            ProgressDrawTarget::hidden()
        };
        let bar = ProgressBar::with_draw_target(Some(total), target).with_position(already);
        let style = ProgressStyle::with_template(
            "{prefix} [{bar:30}] {human_pos}/{human_len} {msg} ({eta} left)",
        );
        bar.set_style(
            style
                .expect("the template is a constant")
                .progress_chars("=> "),
        );
        bar.set_prefix(label);
        bar.set_message(unit);
        Progress {
            bar,
            label,
            unit,
            started: Instant::now(),
            already,
            plain: lines.then(|| Mutex::new(Instant::now())),
        }
    }

    /// `done` more units; `detail` stands behind the count, for example "3,210 tokens/s".
    pub fn add(&self, done: u64, detail: &str) {
        self.bar.inc(done);
        self.bar.set_message(format!("{} {detail}", self.unit));
        let Some(last) = &self.plain else { return };
        let mut last = last.lock().expect("no thread panics while it draws");
        if last.elapsed() >= PLAIN_INTERVAL {
            *last = Instant::now();
            eprintln!("{}", self.line(detail));
        }
    }

    /// A line that stays, above the bar.
    pub fn note(&self, text: &str) {
        if self.plain.is_some() {
            eprintln!("{text}");
        } else {
            self.bar.println(text);
        }
    }

    pub fn finish(self) {
        self.bar.finish_and_clear();
    }

    fn line(&self, detail: &str) -> String {
        let (position, total) = (self.bar.position(), self.bar.length().unwrap_or(0));
        let done_now = position.saturating_sub(self.already).max(1);
        let left = total.saturating_sub(position) as f64 / done_now as f64;
        let left = HumanDuration(self.started.elapsed().mul_f64(left));
        format!(
            "{} {}/{} {} {detail} ({left} left)",
            self.label,
            HumanCount(position),
            HumanCount(total),
            self.unit,
        )
    }
}

/// A line on stderr that asks for something to be done: it is told quiet runs, too.
pub fn ask(text: &str) {
    eprintln!("{text}");
}

/// A line on stderr outside any progress.
pub fn note(text: &str) {
    if !is_quiet() {
        eprintln!("{text}");
    }
}
