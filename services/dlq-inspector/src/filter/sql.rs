//! Translates a filter into a SQL condition. All values are bound as parameters; the SQL text contains only constants.
//!
//! The condition refers to the tables `letters l` and `bodies b`, see [`crate::index`]. It is never NULL: a restriction on
//! a missing field is false and not unknown, so that NOT inverts it.

use std::collections::BTreeMap;

use crate::index::certain_part;
use crate::json_fields::{name_of_number, text_of_number};

use super::{Ages, Comparison, Dictionary, Expr, NumberField, NumberTest, Restriction, TextField, TextTest};

/// Whether the message of a row contains a text.
const MESSAGE_HAS: &str =
    "message_has((SELECT text FROM templates WHERE id = l.template_id), l.message_parts, ?)";

/// A bound value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Param {
    /// An integer.
    Integer(i64),
    /// A text.
    Text(String),
    /// Bytes.
    Blob(Vec<u8>),
    /// NULL.
    Null,
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
    /// Translates a filter, with what the index answered to its [`super::Lookups`].
    #[must_use]
    pub fn of(filter: &Expr, dictionary: &Dictionary) -> Self {
        let mut condition = Self::default();
        condition.add(filter, dictionary);
        condition
    }

    fn add(&mut self, filter: &Expr, dictionary: &Dictionary) {
        match filter {
            Expr::And(all) => self.join(all, "1", " AND ", dictionary),
            Expr::Or(any) => self.join(any, "0", " OR ", dictionary),
            Expr::Not(inner) => {
                self.sql += "NOT ";
                self.join(std::slice::from_ref(inner), "", "", dictionary);
            }
            Expr::Is(restriction) => self.restriction(restriction, dictionary),
        }
    }

    fn join(
        &mut self,
        parts: &[impl std::borrow::Borrow<Expr>],
        if_empty: &str,
        separator: &str,
        dictionary: &Dictionary,
    ) {
        self.sql.push('(');
        if parts.is_empty() {
            self.sql += if_empty;
        }
        for (index, part) in parts.iter().enumerate() {
            if index > 0 {
                self.sql += separator;
            }
            self.add(part.borrow(), dictionary);
        }
        self.sql.push(')');
    }

    fn restriction(&mut self, restriction: &Restriction, dictionary: &Dictionary) {
        match restriction {
            Restriction::Id(id) => match dictionary.text(&id.topic) {
                // A text that is not in the index matches nothing.
                None => self.sql.push('0'),
                Some(topic) => {
                    self.sql += "(l.topic_id = ? AND l.partition = ? AND l.offset = ?)";
                    self.params
                        .extend([topic, i64::from(id.partition), id.offset].map(Param::Integer));
                }
            },
            Restriction::Text(field, test) => match column(*field) {
                Column::TextId(name) => self.interned_text(name, test, dictionary),
                Column::Message => self.message(test, dictionary),
                Column::Job => self.plain(["l.job_id = ?", "instr(l.job_id, ?) > 0", "1"], "l.job_id", test),
                Column::Trace => self.trace(test),
            },
            Restriction::TopicIn(topics) => {
                // One alternative per topic would exceed the depth that SQLite permits.
                self.sql += "l.topic_id IN (SELECT value FROM json_each(?))";
                let ids: Vec<i64> = topics.iter().map(|(id, _)| *id).collect();
                self.params.push(Param::Text(json_array(&ids)));
            }
            Restriction::Number(field, test) => self.number(*field, *test),
            Restriction::Expiry(test, ages) => self.expiry(*test, ages, dictionary),
            Restriction::Header(name, test) => self.listed("b.headers", name, test),
            Restriction::Json(pointer, test) => self.json(pointer, test),
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

    /// A column with an encoded list of names and values, in which an entry with this name matches.
    fn listed(&mut self, column: &str, name: &str, test: &TextTest) {
        let (function, value) = match test {
            TextTest::Equal(text) => ("listed_is", Some(text)),
            TextTest::Has(text) => ("listed_has", Some(text)),
            TextTest::Present => ("listed_exists", None),
        };
        let parameters = if value.is_some() { "?, ?" } else { "?" };
        self.sql += &format!("{function}({column}, {parameters})");
        self.reads_bodies = true;
        self.params.push(Param::Text(name.to_owned()));
        self.params
            .extend(value.map(|text| Param::Blob(text.clone().into_bytes())));
    }

    /// A field of a JSON value, which can be a number.
    fn json(&mut self, pointer: &str, test: &TextTest) {
        const COLUMN: &str = "b.json_fields";
        let of_number = match test {
            TextTest::Equal(text) => text_of_number(text).map(TextTest::Equal),
            TextTest::Has(_) | TextTest::Present => Some(test.clone()),
        };
        let Some(of_number) = of_number else {
            return self.listed(COLUMN, pointer, test);
        };
        self.sql.push('(');
        self.listed(COLUMN, pointer, test);
        self.sql += " OR ";
        self.listed(COLUMN, &name_of_number(pointer), &of_number);
        self.sql.push(')');
    }

    /// A column with an id of the table `texts`.
    fn interned_text(&mut self, column: &str, test: &TextTest, dictionary: &Dictionary) {
        match test {
            TextTest::Equal(text) => match dictionary.text(text) {
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
            TextTest::Present => match dictionary.text("") {
                None => self.sql.push('1'),
                Some(empty) => {
                    self.sql += &format!("l.{column} != ?");
                    self.params.push(Param::Integer(empty));
                }
            },
        }
    }

    fn message(&mut self, test: &TextTest, dictionary: &Dictionary) {
        match test {
            TextTest::Equal(text) => match dictionary.message(text) {
                None => self.sql.push('0'),
                Some((template, parts)) => {
                    self.sql += "(l.message_parts IS ? AND l.template_id = ?)";
                    self.params.push(parts.clone().map_or(Param::Null, Param::Text));
                    self.params.push(Param::Integer(*template));
                }
            },
            TextTest::Has(needle) => {
                let found = dictionary.messages_with(needle);
                if found.are_unknown {
                    self.sql += MESSAGE_HAS;
                    self.params.push(Param::Text(needle.clone()));
                    return;
                }
                if found.all.is_empty() && found.some.is_empty() {
                    self.sql.push('0');
                    return;
                }
                self.sql.push('(');
                if !found.all.is_empty() {
                    self.sql += "l.template_id IN (SELECT value FROM json_each(?)) OR ";
                    self.params.push(Param::Text(json_array(&found.all)));
                }
                // That the parts contain something, or there are none, rules out most rows, so it is tested first.
                self.sql += "((l.message_parts IS NULL OR instr(l.message_parts, ?) > 0) AND \
                             l.template_id IN (SELECT value FROM json_each(?)) AND ";
                self.sql += MESSAGE_HAS;
                self.sql += "))";
                self.params.extend(
                    [certain_part(needle), &json_array(&found.some), needle]
                        .map(|text| Param::Text(text.to_owned())),
                );
            }
            TextTest::Present => match dictionary.message("") {
                None => self.sql.push('1'),
                Some((empty, _)) => {
                    self.sql += "l.template_id != ?";
                    self.params.push(Param::Integer(*empty));
                }
            },
        }
    }

    /// A nullable column with a text. `conditions`: if it equals a text, contains one, is not NULL.
    fn plain(&mut self, [equal, has, present]: [&str; 3], column: &str, test: &TextTest) {
        let (condition, value) = match test {
            // A missing text equals the empty one.
            TextTest::Equal(text) if text.is_empty() => {
                self.sql += &format!("{column} IS NULL");
                return;
            }
            TextTest::Equal(text) => (equal, Some(text)),
            TextTest::Has(text) if text.is_empty() => {
                self.sql.push('1');
                return;
            }
            TextTest::Has(text) => (has, Some(text)),
            TextTest::Present => (present, None),
        };
        self.sql += &format!("({column} IS NOT NULL AND {condition})");
        self.params.extend(value.map(|text| Param::Text(text.clone())));
    }

    /// Trace ids are stored as bytes; filters have their 32 hexadecimal digits.
    fn trace(&mut self, test: &TextTest) {
        let conditions = [
            "lower(hex(l.trace_id)) = ?",
            "instr(lower(hex(l.trace_id)), ?) > 0",
            "1",
        ];
        self.plain(conditions, "l.trace_id", test);
    }

    /// Topics with the same age have one alternative.
    fn expiry(&mut self, test: NumberTest, ages: &Ages, dictionary: &Dictionary) {
        let mut topics: BTreeMap<i64, Vec<i64>> = BTreeMap::new();
        for (topic, age) in ages.iter() {
            if let Some(id) = dictionary.text(topic) {
                topics.entry(*age).or_default().push(id);
            }
        }
        self.sql += "(0";
        for (age, ids) in topics {
            self.sql += " OR (";
            if let NumberTest::Compare(comparison, time) = test {
                self.sql += &format!("l.dead_at {} ? AND ", operator(comparison));
                self.params.push(Param::Integer(time.saturating_sub(age)));
            }
            self.sql += "l.topic_id IN (SELECT value FROM json_each(?)))";
            self.params.push(Param::Text(json_array(&ids)));
        }
        self.sql.push(')');
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
                operator(comparison)
            }
        };
        self.sql += &(if is_nullable {
            format!("(l.{column} IS NOT NULL AND l.{column} {comparison} ?)")
        } else {
            format!("l.{column} {comparison} ?")
        });
    }
}

fn operator(comparison: Comparison) -> &'static str {
    match comparison {
        Comparison::Equal => "=",
        Comparison::Less => "<",
        Comparison::LessOrEqual => "<=",
        Comparison::Greater => ">",
        Comparison::GreaterOrEqual => ">=",
    }
}

fn json_array(ids: &[i64]) -> String {
    let ids: Vec<String> = ids.iter().map(i64::to_string).collect();
    format!("[{}]", ids.join(","))
}

enum Column {
    /// Contains an id of the table `texts`.
    TextId(&'static str),
    Message,
    Job,
    Trace,
}

fn column(field: TextField) -> Column {
    match field {
        TextField::Topic => Column::TextId("topic_id"),
        TextField::Pipeline => Column::TextId("pipeline_id"),
        TextField::ErrorClass => Column::TextId("error_class_id"),
        TextField::ErrorCode => Column::TextId("error_code_id"),
        TextField::OriginTopic => Column::TextId("origin_topic_id"),
        TextField::ErrorMessage => Column::Message,
        TextField::JobId => Column::Job,
        TextField::TraceId => Column::Trace,
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
        NumberField::Group => ("group_id", false),
        NumberField::Dialect => ("dialect", false),
        NumberField::OriginPartition => ("origin_partition", true),
        NumberField::OriginOffset => ("origin_offset", true),
        NumberField::OriginTimestamp => ("origin_timestamp", true),
        NumberField::ValueSize => ("value_size", true),
    }
}
