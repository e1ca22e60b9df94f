//! From the text of a filter to its expression, by recursive descent.

use super::field::{Field, KNOWN, Operator, Value};
use super::{Comparison, Expr, FilterError, MAX_DEPTH, MAX_LENGTH, MAX_RESTRICTIONS};

/// Reads a filter; the empty one is always true.
///
/// # Errors
/// With the character at which it is wrong.
pub fn parse(text: &str) -> Result<Expr, FilterError> {
    if text.len() > MAX_LENGTH {
        return Err(FilterError {
            position: MAX_LENGTH + 1,
            problem: format!("the filter has {} bytes; it may have {MAX_LENGTH}", text.len()),
        });
    }
    let mut parser = Parser {
        chars: text.chars().collect(),
        at: 0,
        restrictions: 0,
    };
    parser.skip_spaces();
    if parser.is_at_end() {
        return Ok(Expr::And(Vec::new()));
    }
    let expression = parser.expression(0)?;
    match parser.peek() {
        None => Ok(expression),
        Some(found) => Err(parser.wrong(format!("`{found}` has nothing to close"))),
    }
}

struct Parser {
    chars: Vec<char>,
    at: usize,
    restrictions: usize,
}

type Parsed = Result<Expr, FilterError>;

impl Parser {
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

    fn wrong(&self, problem: impl Into<String>) -> FilterError {
        Self::wrong_at(self.at, problem)
    }

    fn wrong_at(at: usize, problem: impl Into<String>) -> FilterError {
        FilterError {
            position: at + 1,
            problem: problem.into(),
        }
    }

    /// Takes a keyword if it stands here as a word of its own.
    fn keyword(&mut self, word: &str) -> bool {
        let end = self.at + word.len();
        let here = self.chars.get(self.at..end);
        let is_it = here.is_some_and(|here| here.iter().copied().eq(word.chars()));
        let ends = self
            .chars
            .get(end)
            .is_none_or(|next| next.is_whitespace() || matches!(next, '(' | ')'));
        if is_it && ends {
            self.at = end;
            self.skip_spaces();
        }
        is_it && ends
    }

    fn expression(&mut self, depth: usize) -> Parsed {
        let mut all = vec![self.sequence(depth)?];
        while self.keyword("AND") {
            all.push(self.sequence(depth)?);
        }
        Ok(joined(all, Expr::And))
    }

    /// Factors side by side.
    fn sequence(&mut self, depth: usize) -> Parsed {
        let mut all = vec![self.factor(depth)?];
        loop {
            let before = self.at;
            let ends = self.is_at_end() || self.peek() == Some(')') || self.keyword("AND");
            if ends {
                self.at = before;
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
            return Err(self.wrong(format!("the filter is nested more than {MAX_DEPTH} deep")));
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
                    return Err(Self::wrong_at(opened, "`(` is not closed"));
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
            return Err(self.wrong(format!(
                "the filter has more than {MAX_RESTRICTIONS} restrictions"
            )));
        }
        let path = self.path()?;
        let name = path.join(".");
        let Some(field) = Field::named(&path) else {
            let hint = match name.as_str() {
                "and" | "or" | "not" => format!("; write {} in capitals", name.to_uppercase()),
                _ => format!("; fields are {KNOWN}"),
            };
            return Err(Self::wrong_at(start, format!("unknown field `{name}`{hint}")));
        };
        self.skip_spaces();
        let Some(operator) = self.operator() else {
            return Err(self.wrong(format!("expected one of = != < <= > >= : behind `{name}`")));
        };
        self.skip_spaces();
        let at_value = self.at;
        let value = self.value()?;
        self.skip_spaces();
        field
            .restriction(operator, value)
            .map_err(|problem| Self::wrong_at(at_value, format!("{name}: {problem}")))
    }

    fn path(&mut self) -> Result<Vec<String>, FilterError> {
        let mut path = Vec::new();
        loop {
            let part = match self.peek() {
                Some(quote @ ('"' | '\'')) => self.quoted(quote)?,
                _ => self.run(|c| c.is_alphanumeric() || matches!(c, '_' | '-')),
            };
            if part.is_empty() {
                let found = self
                    .peek()
                    .map_or("the end".to_owned(), |found| format!("`{found}`"));
                return Err(self.wrong(format!("expected a field, found {found}")));
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
                let text = self.run(|c| !c.is_whitespace() && !matches!(c, '(' | ')' | '"' | '\''));
                match text.as_str() {
                    "" => Err(self.wrong("expected a value")),
                    "*" => Ok(Value::Any),
                    _ => Ok(Value::Text(text)),
                }
            }
        }
    }

    fn run(&mut self, belongs: impl Fn(char) -> bool) -> String {
        let start = self.at;
        while self.peek().is_some_and(&belongs) {
            self.at += 1;
        }
        self.chars[start..self.at].iter().collect()
    }

    /// A text in quotes; a backslash takes the next character as it is.
    fn quoted(&mut self, quote: char) -> Result<String, FilterError> {
        let opened = self.at;
        self.at += 1;
        let mut text = String::new();
        loop {
            match self.peek() {
                None => return Err(Self::wrong_at(opened, "the quotation mark is not closed")),
                Some(c) if c == quote => {
                    self.at += 1;
                    return Ok(text);
                }
                Some('\\') => {
                    self.at += 1;
                    let escaped = self.peek();
                    text.push(
                        escaped.ok_or_else(|| Self::wrong_at(opened, "the quotation mark is not closed"))?,
                    );
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
