//! The date for chat templates that tell the model what day it is.

use std::time::{SystemTime, UNIX_EPOCH};

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
const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];

/// The present in UTC, written as `format` says: `%Y %y %m %B %b %d %A %a %H %M %S` and `%%`.
pub(super) fn format_now(format: &str) -> Result<String, String> {
    // A clock before 1970 is no reason to refuse a prompt.
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    format_at(format, now)
}

fn format_at(format: &str, seconds: u64) -> Result<String, String> {
    let days = seconds / 86_400;
    let (year, month, day) = civil(days);
    let (month_name, day_name) = (MONTHS[month - 1], DAYS[(days % 7) as usize]);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    let mut text = String::new();
    let mut characters = format.chars();
    while let Some(c) = characters.next() {
        if c != '%' {
            text.push(c);
            continue;
        }
        match characters.next() {
            Some('Y') => text += &year.to_string(),
            Some('y') => text += &format!("{:02}", year % 100),
            Some('m') => text += &format!("{month:02}"),
            Some('B') => text += month_name,
            Some('b') => text += &month_name[..3],
            Some('d') => text += &format!("{day:02}"),
            Some('A') => text += day_name,
            Some('a') => text += &day_name[..3],
            Some('H') => text += &format!("{hour:02}"),
            Some('M') => text += &format!("{minute:02}"),
            Some('S') => text += &format!("{second:02}"),
            Some('%') => text.push('%'),
            other => {
                return Err(format!(
                    "strftime_now does not know %{}",
                    other.map_or(String::new(), String::from)
                ));
            }
        }
    }
    Ok(text)
}

/// Year, month (1..=12) and day of a number of days after 1 January 1970.
fn civil(mut days: u64) -> (u64, usize, u64) {
    let leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let mut year = 1970;
    while days >= 365 + u64::from(leap(year)) {
        days -= 365 + u64::from(leap(year));
        year += 1;
    }
    let lengths = [31, 28 + u64::from(leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 0;
    while days >= lengths[month] {
        days -= lengths[month];
        month += 1;
    }
    (year, month + 1, days + 1)
}

#[cfg(test)]
mod tests {
    use super::format_at;

    /// Dates whose seconds are widely published.
    #[test]
    fn known_dates() {
        for (seconds, expected) in [
            (0, "Thursday 01 January 1970 00:00:00"),
            (951_782_400, "Tuesday 29 February 2000 00:00:00"),
            (1_000_000_000, "Sunday 09 September 2001 01:46:40"),
            (1_234_567_890, "Friday 13 February 2009 23:31:30"),
            (1_709_251_199, "Thursday 29 February 2024 23:59:59"),
            (4_107_542_400, "Monday 01 March 2100 00:00:00"),
        ] {
            assert_eq!(format_at("%A %d %B %Y %H:%M:%S", seconds).unwrap(), expected);
        }
        assert_eq!(format_at("%a %b %y %m 100%%", 1_234_567_890).unwrap(), "Fri Feb 09 02 100%");
        assert!(format_at("%", 0).is_err());
    }
}
