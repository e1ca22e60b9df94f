//! The parser of filters, by recursive descent.

use std::ops::Range;

use redeliver_core::failure::bounded_text;

use super::field::{FIELD_NAMES, Field, Operator, Value};
use super::{Comparison, Expr, FilterError, MAX_DEPTH, MAX_LENGTH, MAX_RESTRICTIONS, Restriction};

/// Stands for a text in a recorded filter.
const SECRET: &str = "<value>";

/// Errors contain the name of a field up to this length, in bytes.
const SHOWN_NAME: usize = 200;

/// Parses a filter. An empty filter matches everything. `json_fields` are the JSON pointers that are indexed.
///
/// # Errors
/// If the filter is invalid, with the position of the error.
pub fn parse(text: &str, json_fields: &[String]) -> Result<Expr, FilterError> {
    parse_with_secrets(text, json_fields, &|_| false, false).map(|(expression, _)| expression)
}

/// Parses a filter of [`without_secrets`]. A restriction with `<value>` tests whether its field is present.
///
/// # Errors
/// As [`parse`].
pub fn parse_recorded(text: &str, json_fields: &[String]) -> Result<Expr, FilterError> {
    parse_with_secrets(text, json_fields, &|_| false, true).map(|(expression, _)| expression)
}

/// A filter in which `<value>` stands for each text that is searched for in keys, headers, values, error messages and what is masked. Who may not
/// see these must not learn it from the searches of others.
///
/// # Errors
/// If the filter is invalid.
pub fn without_secrets(
    text: &str,
    json_fields: &[String],
    is_masked: &dyn Fn(&Restriction) -> bool,
) -> Result<String, FilterError> {
    let (_, secrets) = parse_with_secrets(text, json_fields, is_masked, false)?;
    let mut shown = String::with_capacity(text.len());
    let mut secrets = secrets.into_iter().peekable();
    for (at, c) in text.chars().enumerate() {
        while secrets.next_if(|secret| secret.end <= at).is_some() {}
        match secrets.peek() {
            Some(secret) if secret.start == at => shown.push_str(SECRET),
            Some(secret) if secret.contains(&at) => {}
            _ => shown.push(c),
        }
    }
    Ok(shown)
}

/// A filter, and which of its characters are texts that are searched for in payloads and messages, and in what is masked.
fn parse_with_secrets(
    text: &str,
    json_fields: &[String],
    is_masked: &dyn Fn(&Restriction) -> bool,
    is_recorded: bool,
) -> Result<(Expr, Vec<Range<usize>>), FilterError> {
    if text.len() > MAX_LENGTH {
        return Err(FilterError {
            position: MAX_LENGTH + 1,
            problem: format!("filter has {} bytes; the limit is {MAX_LENGTH}", text.len()),
        });
    }
    let mut parser = Parser {
        chars: text.chars().collect(),
        at: 0,
        restrictions: 0,
        secrets: Vec::new(),
        json_fields,
        is_masked,
        is_recorded,
    };
    parser.skip_spaces();
    if parser.is_at_end() {
        return Ok((Expr::And(Vec::new()), Vec::new()));
    }
    let expression = parser.expression(0)?;
    match parser.peek() {
        None => Ok((expression, parser.secrets)),
        Some(found) => Err(parser.error(format!("unmatched `{found}`"))),
    }
}

struct Parser<'a> {
    chars: Vec<char>,
    at: usize,
    restrictions: usize,
    /// Which characters are texts that are searched for in payloads and messages, and in what is masked.
    secrets: Vec<Range<usize>>,
    json_fields: &'a [String],
    is_masked: &'a dyn Fn(&Restriction) -> bool,
    /// Whether [`SECRET`] stands for secrets.
    is_recorded: bool,
}

type Parsed = Result<Expr, FilterError>;

impl Parser<'_> {
    fn peek(&self) -> Option<char> {
        self.chars.get(self.at).copied()
    }

    fn is_at_end(&self) -> bool {
        self.at >= self.chars.len()
    }

    fn skip_spaces(&mut self) {
        while self.peek().is_some_and(char::is_whitespace) {
            self.at += 1;
        }
    }

    fn error(&self, problem: impl Into<String>) -> FilterError {
        Self::error_at(self.at, problem)
    }

    fn error_at(at: usize, problem: impl Into<String>) -> FilterError {
        FilterError {
            position: at + 1,
            problem: problem.into(),
        }
    }

    /// Consumes a keyword, if the next word is this keyword.
    fn keyword(&mut self, word: &str) -> bool {
        let end = self.at + word.len();
        let next = self.chars.get(self.at..end);
        let matches = next.is_some_and(|next| next.iter().copied().eq(word.chars()));
        let is_whole_word = self
            .chars
            .get(end)
            .is_none_or(|next| next.is_whitespace() || matches!(next, '(' | ')'));
        if matches && is_whole_word {
            self.at = end;
            self.skip_spaces();
        }
        matches && is_whole_word
    }

    fn expression(&mut self, depth: usize) -> Parsed {
        let mut all = vec![self.sequence(depth)?];
        while self.keyword("AND") {
            all.push(self.sequence(depth)?);
        }
        Ok(joined(all, Expr::And))
    }

    /// Adjacent factors, which are joined by AND.
    fn sequence(&mut self, depth: usize) -> Parsed {
        let mut all = vec![self.factor(depth)?];
        loop {
            let start = self.at;
            let ends = self.is_at_end() || self.peek() == Some(')') || self.keyword("AND");
            if ends {
                // The caller consumes the AND.
                self.at = start;
                return Ok(joined(all, Expr::And));
            }
            all.push(self.factor(depth)?);
        }
    }

    fn factor(&mut self, depth: usize) -> Parsed {
        let mut any = vec![self.term(depth)?];
        while self.keyword("OR") {
            any.push(self.term(depth)?);
        }
        Ok(joined(any, Expr::Or))
    }

    fn term(&mut self, depth: usize) -> Parsed {
        if depth > MAX_DEPTH {
            return Err(self.error(format!("filter is nested more than {MAX_DEPTH} levels deep")));
        }
        if self.keyword("NOT") {
            return Ok(Expr::Not(Box::new(self.term(depth + 1)?)));
        }
        match self.peek() {
            Some('-') => {
                self.at += 1;
                Ok(Expr::Not(Box::new(self.term(depth + 1)?)))
            }
            Some('(') => {
                let opened = self.at;
                self.at += 1;
                self.skip_spaces();
                let inner = self.expression(depth + 1)?;
                if self.peek() != Some(')') {
                    return Err(Self::error_at(opened, "unclosed `(`"));
                }
                self.at += 1;
                self.skip_spaces();
                Ok(inner)
            }
            _ => self.restriction(),
        }
    }

    fn restriction(&mut self) -> Parsed {
        let start = self.at;
        self.restrictions += 1;
        if self.restrictions > MAX_RESTRICTIONS {
            return Err(self.error(format!("filter has more than {MAX_RESTRICTIONS} restrictions")));
        }
        let path = self.path()?;
        let name = bounded_text(&path.join("."), SHOWN_NAME);
        let Some(field) = Field::from_path(&path) else {
            let hint = match name.as_str() {
                "and" | "or" | "not" => format!("; write {} in upper case", name.to_uppercase()),
                _ => format!("; known fields are {FIELD_NAMES}"),
            };
            return Err(Self::error_at(start, format!("unknown field `{name}`{hint}")));
        };
        if let Field::Json(pointer) = &field
            && !self.json_fields.contains(pointer)
        {
            let known = match self.json_fields {
                [] => "none".to_owned(),
                fields => fields
                    .iter()
                    .map(|field| format!("json.{field}"))
                    .collect::<Vec<_>>()
                    .join(", "),
            };
            let problem = format!("`{name}` is not in dlq_inspector.json_fields; indexed fields: {known}");
            return Err(Self::error_at(start, problem));
        }
        self.skip_spaces();
        let Some(operator) = self.operator() else {
            return Err(self.error(format!("expected one of = != < <= > >= : after `{name}`")));
        };
        self.skip_spaces();
        let value_at = self.at;
        let value = self.value()?;
        let (value_end, is_secret) = (self.at, field.is_secret());
        let hides_secret =
            self.is_recorded && self.chars[value_at..value_end].iter().copied().eq(SECRET.chars());
        let (operator, value) = match hides_secret {
            true => (Operator::Has, Value::Any),
            false => (operator, value),
        };
        let is_text = matches!(value, Value::Text(_));
        self.skip_spaces();
        let restriction = field
            .restriction(operator, value)
            .map_err(|problem| Self::error_at(value_at, format!("{name}: {problem}")))?;
        if is_text && (is_secret || !restriction.all(&|restriction| !(self.is_masked)(restriction))) {
            self.secrets.push(value_at..value_end);
        }
        Ok(restriction)
    }

    fn path(&mut self) -> Result<Vec<String>, FilterError> {
        let mut path = Vec::new();
        loop {
            let part = match self.peek() {
                Some(quote @ ('"' | '\'')) => self.quoted(quote)?,
                // A JSON pointer may contain dots, and is the last part.
                Some('/') if path == ["json"] => {
                    self.take_while(|c| c.is_alphanumeric() || matches!(c, '_' | '-' | '/' | '~' | '.'))
                }
                _ => self.take_while(|c| c.is_alphanumeric() || matches!(c, '_' | '-')),
            };
            if part.is_empty() {
                let found = self
                    .peek()
                    .map_or("end of filter".to_owned(), |found| format!("`{found}`"));
                return Err(self.error(format!("expected a field, found {found}")));
            }
            path.push(part);
            if self.peek() != Some('.') {
                return Ok(path);
            }
            self.at += 1;
        }
    }

    fn operator(&mut self) -> Option<Operator> {
        let next = self.chars.get(self.at + 1);
        let (operator, length) = match (self.peek()?, next) {
            ('=', _) => (Operator::Compare(Comparison::Equal), 1),
            ('!', Some('=')) => (Operator::NotEqual, 2),
            ('<', Some('=')) => (Operator::Compare(Comparison::LessOrEqual), 2),
            ('>', Some('=')) => (Operator::Compare(Comparison::GreaterOrEqual), 2),
            ('<', _) => (Operator::Compare(Comparison::Less), 1),
            ('>', _) => (Operator::Compare(Comparison::Greater), 1),
            (':', _) => (Operator::Has, 1),
            _ => return None,
        };
        self.at += length;
        Some(operator)
    }

    fn value(&mut self) -> Result<Value, FilterError> {
        match self.peek() {
            Some(quote @ ('"' | '\'')) => Ok(Value::Text(self.quoted(quote)?)),
            _ => {
                let text = self.take_while(|c| !c.is_whitespace() && !matches!(c, '(' | ')' | '"' | '\''));
                match text.as_str() {
                    "" => Err(self.error("expected a value")),
                    "*" => Ok(Value::Any),
                    _ => Ok(Value::Text(text)),
                }
            }
        }
    }

    fn take_while(&mut self, predicate: impl Fn(char) -> bool) -> String {
        let start = self.at;
        while self.peek().is_some_and(&predicate) {
            self.at += 1;
        }
        self.chars[start..self.at].iter().collect()
    }

    /// A quoted text, in which a backslash escapes the next character.
    fn quoted(&mut self, quote: char) -> Result<String, FilterError> {
        let opened = self.at;
        self.at += 1;
        let mut text = String::new();
        loop {
            match self.peek() {
                None => return Err(Self::error_at(opened, "unclosed quotation mark")),
                Some(c) if c == quote => {
                    self.at += 1;
                    return Ok(text);
                }
                Some('\\') => {
                    self.at += 1;
                    let escaped = self.peek();
                    text.push(escaped.ok_or_else(|| Self::error_at(opened, "unclosed quotation mark"))?);
                    self.at += 1;
                }
                Some(c) => {
                    text.push(c);
                    self.at += 1;
                }
            }
        }
    }
}

fn joined(mut parts: Vec<Expr>, join: impl FnOnce(Vec<Expr>) -> Expr) -> Expr {
    if parts.len() == 1 {
        parts.remove(0)
    } else {
        join(parts)
    }
}
