//! Where and when something was measured or made.

use serde::{Deserialize, Serialize};
use std::{path::Path, process::Command, time::SystemTime};

/// The machine that computed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Name of its processor, "unknown" where the system does not tell.
    pub cpu: String,
    /// Threads that computed.
    pub threads: usize,
}

impl Machine {
    /// This machine, computing with `threads` threads.
    pub fn this(threads: usize) -> Self {
        let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        Self { cpu: cpu_name(&info).unwrap_or("unknown").to_owned(), threads }
    }
}

fn cpu_name(info: &str) -> Option<&str> {
    let fields = info.lines().filter_map(|line| line.split_once(':'));
    fields.map(|(key, value)| (key.trim(), value.trim())).find(|&(key, _)| key == "model name").map(|f| f.1)
}

/// The commit checked out in `dir`, with "-dirty" after it where tracked files have changed; "unknown"
/// without git or outside a repository.
pub fn commit(dir: &Path) -> String {
    let git = |args: &[&str]| {
        let output = Command::new("git").arg("-C").arg(dir).args(args).output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        output.status.success().then(|| text.trim().to_owned())
    };
    let Some(commit) = git(&["rev-parse", "--short", "HEAD"]).filter(|c| !c.is_empty()) else {
        return "unknown".into();
    };
    match git(&["status", "--porcelain", "--untracked-files=no"]) {
        Some(changes) if !changes.is_empty() => format!("{commit}-dirty"),
        _ => commit,
    }
}

/// The day of `time` in UTC, as YYYY-MM-DD.
pub fn utc_date(time: SystemTime) -> String {
    // Before 1970 there are no measurements.
    let seconds = time.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let mut day = seconds / 86_400;
    let leap = |y: u64| y.is_multiple_of(4) && (!y.is_multiple_of(100) || y.is_multiple_of(400));
    let mut year = 1970;
    while day >= 365 + u64::from(leap(year)) {
        day -= 365 + u64::from(leap(year));
        year += 1;
    }
    let lengths = [31, 28 + u64::from(leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 1;
    for length in lengths {
        if day < length {
            break;
        }
        day -= length;
        month += 1;
    }
    format!("{year}-{month:02}-{:02}", day + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn reads_the_processor_s_name() {
        let info = "processor\t: 0\nvendor_id\t: X\nmodel name\t: Some CPU: 2 GHz\n\nmodel name\t: other\n";
        assert_eq!(cpu_name(info), Some("Some CPU: 2 GHz"));
        assert_eq!(cpu_name("processor : 0\n"), None);
        assert_eq!(Machine::this(3).threads, 3);
    }

    #[test]
    fn dates_of_known_seconds() {
        for (seconds, date) in [
            (0, "1970-01-01"),
            (86_399, "1970-01-01"),
            (951_782_400, "2000-02-29"),
            (951_868_800, "2000-03-01"),
            (1_735_689_599, "2024-12-31"),
            (1_735_689_600, "2025-01-01"),
            (4_107_542_400, "2100-03-01"),
        ] {
            assert_eq!(utc_date(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)), date);
        }
    }

    #[test]
    fn commits_of_a_repository_and_of_none() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(commit(&dir.path().join("missing")), "unknown");
        let git = |args: &[&str]| {
            let identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"];
            Command::new("git").arg("-C").arg(dir.path()).args(identity).args(args).output()
        };
        let Ok(init) = git(&["init", "-q"]) else {
            // A machine without git: everything is unknown.
            assert_eq!(commit(dir.path()), "unknown");
            return;
        };
        assert!(init.status.success());
        assert_eq!(commit(dir.path()), "unknown");
        let file = dir.path().join("file");
        std::fs::write(&file, "a").unwrap();
        git(&["add", "file"]).unwrap();
        let made = git(&["commit", "-q", "--no-gpg-sign", "-m", "first"]).unwrap();
        assert!(made.status.success(), "{made:?}");
        let clean = commit(dir.path());
        assert!(clean.len() >= 4 && clean.chars().all(|c| c.is_ascii_hexdigit()), "{clean}");
        std::fs::write(dir.path().join("untracked"), "a").unwrap();
        assert_eq!(commit(dir.path()), clean);
        std::fs::write(&file, "b").unwrap();
        assert_eq!(commit(dir.path()), format!("{clean}-dirty"));
    }
}
