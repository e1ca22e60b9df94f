//! The command that does the same as a page, so that a person can paste it into a shell.

use std::fmt::Display;

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
    pub(crate) fn option(mut self, name: &str, value: impl Display) -> Self {
        let value = value.to_string();
        if !value.is_empty() {
            // A value that begins with a hyphen would be another option.
            let separator = if value.starts_with('-') { '=' } else { ' ' };
            self.line += &format!(" {name}{separator}{}", quoted(&value));
        }
        self
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
}
