//! How far something has come: a bar on a terminal, else a line every few seconds.

use indicatif::{HumanBytes, HumanDuration, ProgressBar, ProgressStyle};
use std::{
    io::IsTerminal,
    sync::Mutex,
    time::{Duration, Instant},
};

/// Time between lines where standard error is no terminal.
const INTERVAL: Duration = Duration::from_secs(5);

/// Shows on standard error how much of a total is done and how long the rest may take.
pub(crate) struct Progress {
    what: String,
    /// What is told besides, such as a rate.
    rate: Mutex<String>,
    bytes: bool,
    start: Instant,
    bar: Option<ProgressBar>,
    lines: Mutex<Lines>,
}

struct Lines {
    total: u64,
    last: Instant,
    /// What was done when counting began: a continued run did not just now do all of it.
    first: Option<u64>,
}

impl Progress {
    /// Of a number of bytes; 0 where it is not known yet.
    pub(crate) fn bytes(what: impl Into<String>, total: u64) -> Self {
        Self::new(what.into(), total, true)
    }

    /// Of a number of things.
    pub(crate) fn count(what: impl Into<String>, total: u64) -> Self {
        Self::new(what.into(), total, false)
    }

    fn new(what: String, total: u64, bytes: bool) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let numbers = if bytes { "{bytes}/{total_bytes}, {bytes_per_sec}" } else { "{pos}/{len}" };
            let template = format!("{{prefix}} {{wide_bar}} {numbers}{{msg}}, {{eta}} left");
            let style =
                ProgressStyle::with_template(&template).unwrap_or_else(|_| ProgressStyle::default_bar());
            ProgressBar::new(total).with_style(style).with_prefix(what.clone())
        });
        let start = Instant::now();
        Self {
            what,
            rate: Mutex::default(),
            bytes,
            start,
            bar,
            lines: Mutex::new(Lines { total, last: start, first: None }),
        }
    }

    /// Sets the total once it is known.
    pub(crate) fn set_total(&self, total: u64) {
        if let Some(bar) = &self.bar {
            bar.set_length(total);
        }
        self.lines.lock().unwrap_or_else(|e| e.into_inner()).total = total;
    }

    /// Sets what the next lines tell besides.
    pub(crate) fn rate(&self, rate: String) {
        if let Some(bar) = &self.bar {
            bar.set_message(format!(", {rate}"));
        }
        *self.rate.lock().unwrap_or_else(|e| e.into_inner()) = rate;
    }

    /// Tells how much is done.
    pub(crate) fn set(&self, done: u64) {
        // A panic elsewhere leaves nothing half-done in plain fields.
        let mut lines = self.lines.lock().unwrap_or_else(|e| e.into_inner());
        let first = *lines.first.get_or_insert(done);
        if let Some(bar) = &self.bar {
            if bar.position() == 0 && first > 0 {
                bar.set_position(first);
                bar.reset_eta();
            }
            bar.set_position(done);
            return;
        }
        if lines.last.elapsed() >= INTERVAL {
            lines.last = Instant::now();
            eprintln!("{}", self.line(done, first, lines.total, self.start.elapsed()));
        }
    }

    /// Writes a line without disturbing the bar.
    pub(crate) fn note(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| eprintln!("{text}")),
            None => eprintln!("{text}"),
        }
    }

    fn line(&self, done: u64, first: u64, total: u64, elapsed: Duration) -> String {
        let amount = |n: u64| if self.bytes { HumanBytes(n).to_string() } else { n.to_string() };
        if total == 0 {
            return format!("{}: {}", self.what, amount(done));
        }
        let percent = 100.0 * done as f64 / total as f64;
        let mut line = format!("{}: {} of {} ({percent:.0} %)", self.what, amount(done), amount(total));
        let rate = self.rate.lock().unwrap_or_else(|e| e.into_inner());
        if !rate.is_empty() {
            line += &format!(", {rate}");
        }
        if done > first {
            let left = elapsed.mul_f64(total.saturating_sub(done) as f64 / (done - first) as f64);
            line += &format!(", {} left", HumanDuration(left));
        }
        line
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_tells_amount_share_and_time_left() {
        let bytes = Progress::bytes("downloading", 0);
        assert_eq!(bytes.line(5 << 20, 0, 0, Duration::from_secs(2)), "downloading: 5.00 MiB");
        let quarter = bytes.line(5 << 20, 0, 20 << 20, Duration::from_secs(10));
        assert_eq!(quarter, "downloading: 5.00 MiB of 20.00 MiB (25 %), 30 seconds left");
        let count = Progress::count("steps", 100);
        assert_eq!(count.line(0, 0, 100, Duration::ZERO), "steps: 0 of 100 (0 %)");
        // Continued at 80: one of 20 steps took a second.
        let continued = count.line(81, 80, 100, Duration::from_secs(1));
        assert_eq!(continued, "steps: 81 of 100 (81 %), 19 seconds left");
        count.rate("3 tokens/s".into());
        let rated = count.line(81, 80, 100, Duration::from_secs(1));
        assert_eq!(rated, "steps: 81 of 100 (81 %), 3 tokens/s, 19 seconds left");
    }
}
