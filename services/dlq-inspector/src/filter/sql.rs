//! Translates a filter into a SQL condition. All values are bound as parameters; the SQL text contains only constants.
//!
//! The condition refers to the tables `letters l` and `bodies b`, see [`crate::index`]. It is never NULL: a restriction on
//! a missing field is false and not unknown, so that NOT inverts it.

use super::{Comparison, Expr, NumberField, NumberTest, Restriction, TextField, TextTest};

/// A bound value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Param {
    /// An integer.
    Integer(i64),
    /// A text.
    Text(String),
    /// Bytes.
    Blob(Vec<u8>),
}

/// A SQL condition with its parameters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Condition {
    /// The condition, with one `?` for each parameter.
    pub sql: String,
    /// The parameters, in the order of their `?`.
    pub params: Vec<Param>,
    /// Whether the condition refers to the table `bodies`.
    pub reads_bodies: bool,
}

impl Condition {
    /// Translates a filter. `text_id` returns the id of a text in the table `texts`, if it is there.
    #[must_use]
    pub fn of(filter: &Expr, text_id: &dyn Fn(&str) -> Option<i64>) -> Self {
        let mut condition = Self::default();
        condition.add(filter, text_id);
        condition
    }

    fn add(&mut self, filter: &Expr, text_id: &dyn Fn(&str) -> Option<i64>) {
        match filter {
            Expr::And(all) => self.join(all, "1", " AND ", text_id),
            Expr::Or(any) => self.join(any, "0", " OR ", text_id),
            Expr::Not(inner) => {
                self.sql += "NOT ";
                self.join(std::slice::from_ref(inner), "", "", text_id);
            }
            Expr::Is(restriction) => self.restriction(restriction, text_id),
        }
    }

    fn join(
        &mut self,
        parts: &[impl std::borrow::Borrow<Expr>],
        if_empty: &str,
        separator: &str,
        text_id: &dyn Fn(&str) -> Option<i64>,
    ) {
        self.sql.push('(');
        if parts.is_empty() {
            self.sql += if_empty;
        }
        for (index, part) in parts.iter().enumerate() {
            if index > 0 {
                self.sql += separator;
            }
            self.add(part.borrow(), text_id);
        }
        self.sql.push(')');
    }

    fn restriction(&mut self, restriction: &Restriction, text_id: &dyn Fn(&str) -> Option<i64>) {
        match restriction {
            Restriction::Id(id) => match text_id(&id.topic) {
                // A text that is not in the index matches nothing.
                None => self.sql.push('0'),
                Some(topic) => {
                    self.sql += "(l.topic = ? AND l.partition = ? AND l.offset = ?)";
                    self.params
                        .extend([topic, i64::from(id.partition), id.offset].map(Param::Integer));
                }
            },
            Restriction::Text(field, test) => match column(*field) {
                Column::TextId(name) => self.interned_text(name, test, text_id),
                Column::Text(name) => self.plain_text(name, test),
            },
            Restriction::Number(field, test) => self.number(*field, *test),
            Restriction::Header(name, test) => {
                let (function, value) = match test {
                    TextTest::Equal(text) => ("header_is(b.headers, ?, ?)", Some(text)),
                    TextTest::Has(text) => ("header_has(b.headers, ?, ?)", Some(text)),
                    TextTest::Present => ("header_exists(b.headers, ?)", None),
                };
                self.sql += function;
                self.reads_bodies = true;
                self.params.push(Param::Text(name.clone()));
                self.params
                    .extend(value.map(|text| Param::Blob(text.clone().into_bytes())));
            }
            Restriction::Key(test) => {
                let (condition, value) = match test {
                    TextTest::Equal(text) => ("(b.key IS NOT NULL AND b.key = ?)", Some(text)),
                    TextTest::Has(text) => ("(b.key IS NOT NULL AND instr(b.key, ?) > 0)", Some(text)),
                    TextTest::Present => ("(b.key IS NOT NULL AND length(b.key) > 0)", None),
                };
                self.sql += condition;
                self.reads_bodies = true;
                self.params
                    .extend(value.map(|text| Param::Blob(text.clone().into_bytes())));
            }
        }
    }

    /// A column with an id of the table `texts`.
    fn interned_text(&mut self, column: &str, test: &TextTest, text_id: &dyn Fn(&str) -> Option<i64>) {
        match test {
            TextTest::Equal(text) => match text_id(text) {
                None => self.sql.push('0'),
                Some(id) => {
                    self.sql += &format!("l.{column} = ?");
                    self.params.push(Param::Integer(id));
                }
            },
            TextTest::Has(text) => {
                self.sql += &format!("l.{column} IN (SELECT id FROM texts WHERE instr(text, ?) > 0)");
                self.params.push(Param::Text(text.clone()));
            }
            TextTest::Present => match text_id("") {
                None => self.sql.push('1'),
                Some(empty) => {
                    self.sql += &format!("l.{column} != ?");
                    self.params.push(Param::Integer(empty));
                }
            },
        }
    }

    /// A column with the text itself, which is empty if there is none.
    fn plain_text(&mut self, column: &str, test: &TextTest) {
        let (condition, value) = match test {
            // The indexes are partial: they exclude empty texts. SQLite uses them only if the condition does so as well.
            TextTest::Equal(text) if !text.is_empty() => {
                (format!("(l.{column} = ? AND l.{column} != '')"), Some(text))
            }
            TextTest::Equal(text) => (format!("l.{column} = ?"), Some(text)),
            TextTest::Has(text) => (format!("instr(l.{column}, ?) > 0"), Some(text)),
            TextTest::Present => (format!("l.{column} != ''"), None),
        };
        self.sql += &condition;
        self.params.extend(value.map(|text| Param::Text(text.clone())));
    }

    fn number(&mut self, field: NumberField, test: NumberTest) {
        let (column, is_nullable) = number_column(field);
        let comparison = match test {
            NumberTest::Present => {
                self.sql += &(if is_nullable {
                    format!("l.{column} IS NOT NULL")
                } else {
                    "1".to_owned()
                });
                return;
            }
            NumberTest::Compare(comparison, number) => {
                self.params.push(Param::Integer(number));
                match comparison {
                    Comparison::Equal => "=",
                    Comparison::Less => "<",
                    Comparison::LessOrEqual => "<=",
                    Comparison::Greater => ">",
                    Comparison::GreaterOrEqual => ">=",
                }
            }
        };
        self.sql += &(if is_nullable {
            format!("(l.{column} IS NOT NULL AND l.{column} {comparison} ?)")
        } else {
            format!("l.{column} {comparison} ?")
        });
    }
}

enum Column {
    /// Contains an id of the table `texts`.
    TextId(&'static str),
    Text(&'static str),
}

fn column(field: TextField) -> Column {
    match field {
        TextField::Topic => Column::TextId("topic"),
        TextField::Pipeline => Column::TextId("pipeline"),
        TextField::ErrorClass => Column::TextId("error_class"),
        TextField::ErrorCode => Column::TextId("error_code"),
        TextField::OriginTopic => Column::TextId("origin_topic"),
        TextField::ErrorMessage => Column::Text("error_message"),
        TextField::JobId => Column::Text("job_id"),
        TextField::TraceId => Column::Text("trace_id"),
    }
}

/// The column, and whether it is nullable.
fn number_column(field: NumberField) -> (&'static str, bool) {
    match field {
        NumberField::Partition => ("partition", false),
        NumberField::Offset => ("offset", false),
        NumberField::DeadAt => ("dead_at", false),
        NumberField::FailedAt => ("failed_at", true),
        NumberField::RetryCount => ("retry_count", false),
        NumberField::State => ("state", false),
        NumberField::Dialect => ("dialect", false),
        NumberField::OriginPartition => ("origin_partition", true),
        NumberField::OriginOffset => ("origin_offset", true),
        NumberField::OriginTimestamp => ("origin_timestamp", true),
        NumberField::ValueSize => ("value_size", true),
    }
}
