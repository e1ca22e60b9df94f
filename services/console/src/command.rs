//! The command that does the same as a page, so that a person can paste it into a shell.

use std::fmt::Display;

use redeliver_core::terminal::is_harmful;

/// The longest text that is shown, in bytes.
const MAX_TEXT: usize = 200;

/// A command of `redeliver`.
pub(crate) struct Command {
    line: String,
    ends_options: bool,
}

impl Command {
    pub(crate) fn new(verb: &str) -> Self {
        Self {
            line: format!("redeliver {verb}"),
            ends_options: false,
        }
    }

    /// An option, unless its value is empty.
    pub(crate) fn option(self, name: &str, value: impl Display) -> Self {
        match value.to_string() {
            value if value.is_empty() => self,
            value => self.value(name, &value),
        }
    }

    /// An option, also if its value is empty.
    pub(crate) fn value(mut self, name: &str, value: &str) -> Self {
        // A value that begins with a hyphen would be another option.
        let separator = if value.starts_with('-') { '=' } else { ' ' };
        self.line += &format!(" {name}{separator}{}", quoted(value));
        self
    }

    /// An option with a text, or the one that reads it from a file if it does not fit into one line.
    pub(crate) fn text(self, name: &str, text: &str) -> Self {
        if text.len() > MAX_TEXT || text.contains(is_harmful) {
            self.value(&format!("{name}-file"), "FILE")
        } else {
            self.value(name, text)
        }
    }

    pub(crate) fn flag(mut self, name: &str, is_set: bool) -> Self {
        if is_set {
            self.line += &format!(" {name}");
        }
        self
    }

    /// An argument. All options come before.
    pub(crate) fn argument(mut self, value: impl Display) -> Self {
        let value = value.to_string();
        if value.starts_with('-') && !self.ends_options {
            self.line += " --";
            self.ends_options = true;
        }
        self.line += &format!(" {}", quoted(&value));
        self
    }
}

impl From<&Command> for String {
    fn from(command: &Command) -> Self {
        command.line.clone()
    }
}

impl From<Command> for String {
    fn from(command: Command) -> Self {
        command.line
    }
}

/// What is entered, or what stands for it.
pub(crate) fn or<'t>(entered: &'t str, placeholder: &'t str) -> &'t str {
    match entered.trim() {
        "" => placeholder,
        entered => entered,
    }
}

/// A text as one argument of a shell.
fn quoted(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:@".contains(c);
    if !text.is_empty() && text.chars().all(is_plain) {
        text.to_owned()
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_quoted_for_shells() {
        assert_eq!(quoted("orders-dlq/7/0"), "orders-dlq/7/0");
        assert_eq!(quoted("it's $HOME"), r"'it'\''s $HOME'");
        assert_eq!(quoted(""), "''");
    }

    #[test]
    fn hyphens_are_no_options() {
        let command = Command::new("x")
            .option("--app", "-a")
            .option("--none", "")
            .flag("--force", true)
            .argument("-1")
            .argument("-2");
        assert_eq!(String::from(command), "redeliver x --app=-a --force -- -1 -2");
    }

    #[test]
    fn long_texts_are_in_files() {
        for (text, shown) in [
            ("", "--value ''"),
            ("a b", "--value 'a b'"),
            ("a\nb", "--value-file FILE"),
            (&"x".repeat(201), "--value-file FILE"),
        ] {
            let command = Command::new("x").text("--value", text);
            assert_eq!(String::from(command), format!("redeliver x {shown}"));
        }
    }
}
