//! Checks a cron expression before croner reads it.
//!
//! croner names neither the field nor the valid range in its errors, and accepts text without a useful meaning: `1SUN` in any
//! field is 10, `,` matches nothing, `1-5L` as a day never matches.

use std::ops::RangeInclusive;

use super::MAX_EXPRESSION;

/// A field of an expression.
struct Field {
    name: &'static str,
    range: RangeInclusive<u16>,
    /// Names of values, in upper case.
    names: &'static [(&'static str, u16)],
    kind: Kind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Plain,
    DayOfMonth,
    Weekday,
}

const fn plain(name: &'static str, range: RangeInclusive<u16>) -> Field {
    Field {
        name,
        range,
        names: &[],
        kind: Kind::Plain,
    }
}

const FIELDS: [Field; 6] = [
    plain("second", 0..=59),
    plain("minute", 0..=59),
    plain("hour", 0..=23),
    Field {
        name: "day of the month",
        range: 1..=31,
        names: &[],
        kind: Kind::DayOfMonth,
    },
    Field {
        name: "month",
        range: 1..=12,
        names: &[
            ("JAN", 1),
            ("FEB", 2),
            ("MAR", 3),
            ("APR", 4),
            ("MAY", 5),
            ("JUN", 6),
            ("JUL", 7),
            ("AUG", 8),
            ("SEP", 9),
            ("OCT", 10),
            ("NOV", 11),
            ("DEC", 12),
        ],
        kind: Kind::Plain,
    },
    Field {
        name: "weekday",
        range: 0..=7,
        names: &[
            ("SUN", 0),
            ("MON", 1),
            ("TUE", 2),
            ("WED", 3),
            ("THU", 4),
            ("FRI", 5),
            ("SAT", 6),
        ],
        kind: Kind::Weekday,
    },
];

const NICKNAMES: [&str; 6] = ["@HOURLY", "@DAILY", "@WEEKLY", "@MONTHLY", "@YEARLY", "@ANNUALLY"];

/// Checks an expression.
///
/// # Errors
/// The field, what is wrong with it, and what would be valid.
pub(super) fn check(expression: &str) -> Result<(), String> {
    if expression.len() > MAX_EXPRESSION {
        let length = expression.len();
        return Err(format!(
            "has {length} bytes; at most {MAX_EXPRESSION} are allowed"
        ));
    }
    if let Some(other) = expression.chars().find(|c| !c.is_ascii_graphic() && *c != ' ') {
        return Err(format!(
            "contains the character {other:?}; use ASCII, with spaces between fields"
        ));
    }
    let upper = expression.to_ascii_uppercase();
    let upper = upper.trim();
    if upper.starts_with('@') {
        return if NICKNAMES.contains(&upper) {
            Ok(())
        } else {
            let valid = NICKNAMES.map(str::to_ascii_lowercase).join(", ");
            Err(format!(
                "`{}` is not known; use one of {valid}",
                expression.trim()
            ))
        };
    }
    let texts: Vec<&str> = upper.split(' ').filter(|text| !text.is_empty()).collect();
    let fields = match texts.len() {
        5 => &FIELDS[1..],
        6 => &FIELDS[..],
        found => {
            return Err(format!(
                "has {found} fields; write 5 (minute, hour, day of the month, month, weekday), or 6 with the second in front"
            ));
        }
    };
    for (index, (field, text)) in fields.iter().zip(texts).enumerate() {
        field
            .check(text)
            .map_err(|problem| format!("field {} ({}): {problem}", index + 1, field.name))?;
    }
    Ok(())
}

impl Field {
    fn check(&self, text: &str) -> Result<(), String> {
        if self.kind != Kind::Plain && text == "?" {
            return Ok(());
        }
        // A plus sign in front of the weekday: the day of the month must match, too.
        let text = match text.strip_prefix('+') {
            Some(rest) if self.kind == Kind::Weekday => rest,
            _ => text,
        };
        if text == "*" {
            return Ok(());
        }
        let items: Vec<&str> = text.split(',').collect();
        if self.kind == Kind::DayOfMonth && items.contains(&"L") && items.contains(&"LW") {
            return Err("`L` and `LW` cannot be combined".into());
        }
        items.into_iter().try_for_each(|item| self.check_item(item))
    }

    fn check_item(&self, item: &str) -> Result<(), String> {
        match item {
            "" => return Err("an item of the list is empty".into()),
            "*" => return Err("`*` cannot be an item of a list; write only `*`".into()),
            _ => {}
        }
        if let Some((values, step)) = item.split_once('/') {
            let span = self.range.end() - self.range.start() + 1;
            if number(step).is_none_or(|step| step == 0 || step > span) {
                return Err(format!("the step `{step}` of `{item}` must be from 1 to {span}"));
            }
            return match values {
                "*" => Ok(()),
                _ if values.contains('-') => self.check_range(values),
                _ => Err(format!(
                    "`{item}` has a step without a range; write `{values}-{}/{step}`, or `*/{step}`",
                    self.range.end()
                )),
            };
        }
        match self.kind {
            Kind::DayOfMonth => {
                if matches!(item, "L" | "LW") {
                    return Ok(());
                }
                if let Some(day) = item.strip_suffix('W') {
                    return self.check_value(day);
                }
            }
            Kind::Weekday => {
                if let Some((day, nth)) = item.split_once('#') {
                    if !matches!(nth, "1" | "2" | "3" | "4" | "5" | "L") {
                        return Err(format!(
                            "`{item}` needs a number from 1 to 5, or L, after the `#`"
                        ));
                    }
                    return self.check_value(day);
                }
                if let Some(day) = item.strip_suffix('L') {
                    return self.check_value(day);
                }
            }
            Kind::Plain => {}
        }
        if item.contains('-') {
            return self.check_range(item);
        }
        self.check_value(item)
    }

    fn check_range(&self, text: &str) -> Result<(), String> {
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        self.check_value(first)?;
        self.check_value(last)?;
        // As the end of a range, Sunday is 7.
        let end = if last == "SUN" { Some(7) } else { self.value(last) };
        if self.value(first) > end {
            return Err(format!(
                "the range `{text}` ends before it begins; write its values as a list"
            ));
        }
        Ok(())
    }

    fn check_value(&self, text: &str) -> Result<(), String> {
        if self.value(text).is_some() {
            return Ok(());
        }
        let names = match (self.names.first(), self.names.last()) {
            (Some((first, _)), Some((last, _))) => format!(", or {first} to {last}"),
            _ => String::new(),
        };
        let (first, last) = (self.range.start(), self.range.end());
        Err(format!("`{text}` is not valid; use {first} to {last}{names}"))
    }

    fn value(&self, text: &str) -> Option<u16> {
        let named = self.names.iter().find(|(name, _)| *name == text);
        named
            .map(|(_, value)| *value)
            .or_else(|| number(text).filter(|value| self.range.contains(value)))
    }
}

/// A number of one to three digits.
fn number(text: &str) -> Option<u16> {
    let is_number = (1..=3).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| text.parse().ok()).flatten()
}
