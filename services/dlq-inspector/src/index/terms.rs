//! The full-text index of equalities. The document of a dead letter has one term for each header, for its key, its JSON
//! fields and the other fields that filters compare with `=`. A term is a hash, so that values of any bytes and any length
//! have short terms. Different values can have the same term: a filter tests each row that the index finds. Without it, such filters read every
//! row, 0.2 to 1.5 s for 1,000,000 dead letters, and a table of headers would cost more to write than all other tables.
//!
//! The number of terms of a dead letter is bounded ([`MAX_DOCUMENT`]). One with more headers has a term that says so, and is tested by every
//! filter on headers.
//!
//! The row numbers of the index are those of `letters`, which increase with `dead_at`: the index returns rows in the order of
//! lists, and conjunctions are intersected without reading rows.

use crate::filter::{
    Comparison, Dictionary, Expr, NumberField, NumberTest, Restriction, TextField, TextTest,
};
use crate::header_list;
use crate::json_fields::{name_of_number, text_of_number};
use crate::letter::Letter;

/// The table. It does not store the documents, and can delete them by row number.
pub(super) const CREATE: &str = "
CREATE VIRTUAL TABLE terms USING fts5 (
    document, content='', contentless_delete=1, detail=none, tokenize='ascii'
);
INSERT INTO terms (terms, rank) VALUES ('hashsize', 8388608);
";

/// The query for the dead letters of a group in a topic.
pub(super) fn of_group(group_id: i64, topic: &str) -> String {
    let mut group = String::new();
    push_number(&mut group, Kind::Group, group_id);
    format!("({}AND {})", group, of_topic(topic))
}

fn of_topic(topic: &str) -> String {
    let mut term = String::new();
    push(&mut term, Kind::Topic, b"", topic.as_bytes());
    term.trim_end().to_owned()
}

/// More alternatives than this are found by a scan instead.
const MAX_ALTERNATIVES: usize = 64;

/// What a term is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Header = 1,
    Key = 2,
    Json = 3,
    Topic = 4,
    Pipeline = 5,
    ErrorClass = 6,
    ErrorCode = 7,
    Template = 8,
    OriginTopic = 9,
    OriginPartition = 10,
    OriginOffset = 11,
    JobId = 12,
    TraceId = 13,
    Group = 14,
    /// Not all headers have terms.
    MoreHeaders = 15,
}

/// The maximum number of terms of a dead letter, apart from JSON fields, whose number the configuration limits.
const MAX_DOCUMENT: usize = 256;
/// The maximum number of those that are not about headers.
const MAX_OTHERS: usize = 16;

/// A hash that is the same in every version and on every machine (FNV-1a with a final mix). It does not withstand attacks;
/// equal hashes of different values cost time only.
pub(super) fn stable_hash<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let mut add = |byte: u8| hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    for part in parts {
        (part.len() as u64).to_le_bytes().into_iter().for_each(&mut add);
        part.iter().copied().for_each(&mut add);
    }
    hash = (hash ^ (hash >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    hash ^ (hash >> 32)
}

/// The letters and digits of a term.
const ALPHABET: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";
/// 40 bits of the hash.
const TERM_LENGTH: usize = 8;

/// Appends a term and a space.
fn push(document: &mut String, kind: Kind, name: &[u8], value: &[u8]) {
    let mut hash = stable_hash([&[kind as u8][..], name, value]);
    for _ in 0..TERM_LENGTH {
        document.push(char::from(ALPHABET[(hash % 32) as usize]));
        hash /= 32;
    }
    document.push(' ');
}

fn push_number(document: &mut String, kind: Kind, number: i64) {
    push(document, kind, b"", &number.to_be_bytes());
}

/// The document of a dead letter.
pub(super) fn document(letter: &Letter, template_id: i64) -> String {
    let facts = &letter.facts;
    let mut document = String::with_capacity(32 * (TERM_LENGTH + 1));
    let headers = header_list::iter(&letter.headers);
    let mut headers = headers.filter_map(|(name, value)| Some((name, value?)));
    for (name, value) in headers.by_ref().take(MAX_DOCUMENT - MAX_OTHERS) {
        push(&mut document, Kind::Header, name.as_bytes(), value);
    }
    if headers.next().is_some() {
        push(&mut document, Kind::MoreHeaders, b"", b"");
    }
    for (pointer, value) in header_list::iter(letter.json_fields.as_deref().unwrap_or_default()) {
        push(
            &mut document,
            Kind::Json,
            pointer.as_bytes(),
            value.unwrap_or_default(),
        );
    }
    if let Some(key) = &letter.key {
        push(&mut document, Kind::Key, b"", key);
    }
    let mut push_text = |kind, text: &str| {
        if !text.is_empty() {
            push(&mut document, kind, b"", text.as_bytes());
        }
    };
    push_text(Kind::Topic, &letter.position.topic);
    push_text(Kind::Pipeline, &facts.pipeline);
    push_text(Kind::ErrorClass, &facts.error_class);
    push_text(Kind::ErrorCode, &facts.error_code);
    push_text(Kind::JobId, facts.job_id.as_deref().unwrap_or_default());
    push_text(Kind::TraceId, facts.trace_id.as_deref().unwrap_or_default());
    push_number(&mut document, Kind::Template, template_id);
    push_number(&mut document, Kind::Group, letter.group.number());
    if let Some(origin) = &facts.origin {
        push(&mut document, Kind::OriginTopic, b"", origin.topic.as_bytes());
        if let Some(partition) = origin.partition {
            push_number(&mut document, Kind::OriginPartition, partition.into());
        }
        if let Some(offset) = origin.offset {
            push_number(&mut document, Kind::OriginOffset, offset);
        }
    }
    document
}

/// The parser of FTS5 overflows its stack at some 30 nested parentheses. What is nested deeper than this is left out.
const MAX_NESTING: usize = 8;

/// The maximum number of terms of a query. FTS5 opens all of them before the first row, and cannot be interrupted meanwhile. What
/// would exceed it is left out, or the index does not help.
const MAX_TERMS: usize = 256;

/// A query of FTS5.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Query {
    text: String,
    terms: usize,
}

impl Query {
    fn one(term: &str) -> Self {
        Self {
            text: term.trim_end().to_owned(),
            terms: 1,
        }
    }

    /// `None` for no queries, and for too many terms.
    fn joined(mut queries: Vec<Self>, operator: &str) -> Option<Self> {
        if queries.len() == 1 {
            return queries.pop();
        }
        let terms = queries.iter().map(|query| query.terms).sum();
        let texts: Vec<String> = queries.into_iter().map(|query| query.text).collect();
        (1..=MAX_TERMS).contains(&terms).then(|| Self {
            text: format!("({})", texts.join(operator)),
            terms,
        })
    }

    fn any(queries: impl IntoIterator<Item = Self>) -> Option<Self> {
        Self::joined(queries.into_iter().collect(), " OR ")
    }

    /// Without the largest ones if they are too many: the others find more rows, each of which is tested.
    fn all(queries: impl IntoIterator<Item = Self>) -> Option<Self> {
        let mut queries: Vec<Self> = queries.into_iter().collect();
        while queries.iter().map(|query| query.terms).sum::<usize>() > MAX_TERMS {
            let largest = (0..queries.len()).max_by_key(|index| queries[*index].terms)?;
            queries.remove(largest);
        }
        Self::joined(queries, " AND ")
    }
}

/// A query of the index that finds at least the rows that match a filter; `None` if the index does not help.
pub(super) fn query(filter: &Expr, dictionary: &Dictionary) -> Option<String> {
    nested(filter, dictionary, 0).map(|query| query.text)
}

fn nested(filter: &Expr, dictionary: &Dictionary, nesting: usize) -> Option<Query> {
    let part = |part| nested(part, dictionary, nesting + 1);
    match filter {
        Expr::And(_) | Expr::Or(_) if nesting == MAX_NESTING => None,
        Expr::And(all) => Query::all(all.iter().filter_map(part)),
        Expr::Or(any) => Query::any(any.iter().map(part).collect::<Option<Vec<Query>>>()?),
        Expr::Not(_) => None,
        Expr::Is(restriction) => of_restriction(restriction, dictionary),
    }
}

fn of_restriction(restriction: &Restriction, dictionary: &Dictionary) -> Option<Query> {
    let mut term = String::new();
    match restriction {
        Restriction::Text(TextField::ErrorMessage, test) => return of_message(test, dictionary),
        Restriction::Text(field, TextTest::Equal(text)) if !text.is_empty() => {
            let kind = match field {
                TextField::Topic => Kind::Topic,
                TextField::Pipeline => Kind::Pipeline,
                TextField::ErrorClass => Kind::ErrorClass,
                TextField::ErrorCode => Kind::ErrorCode,
                TextField::OriginTopic => Kind::OriginTopic,
                TextField::JobId => Kind::JobId,
                TextField::TraceId => Kind::TraceId,
                TextField::ErrorMessage => return None,
            };
            push(&mut term, kind, b"", text.as_bytes());
        }
        Restriction::TopicIn(topics) => {
            let is_few = (1..=MAX_ALTERNATIVES).contains(&topics.len());
            let topics = topics.iter().filter(|_| is_few);
            return Query::any(topics.map(|(_, topic)| Query::one(&of_topic(topic))));
        }
        Restriction::Header(name, TextTest::Equal(text)) => {
            push(&mut term, Kind::Header, name.as_bytes(), text.as_bytes());
            let mut more = String::new();
            push(&mut more, Kind::MoreHeaders, b"", b"");
            return Query::any([&term, &more].map(|term| Query::one(term)));
        }
        Restriction::Json(pointer, TextTest::Equal(text)) => {
            push(&mut term, Kind::Json, pointer.as_bytes(), text.as_bytes());
            if let Some(number) = text_of_number(text) {
                let mut of_number = String::new();
                let name = name_of_number(pointer);
                push(&mut of_number, Kind::Json, name.as_bytes(), number.as_bytes());
                return Query::any([&term, &of_number].map(|term| Query::one(term)));
            }
        }
        Restriction::Key(TextTest::Equal(text)) => push(&mut term, Kind::Key, b"", text.as_bytes()),
        Restriction::Number(field, NumberTest::Compare(Comparison::Equal, number)) => {
            let kind = match field {
                NumberField::OriginPartition => Kind::OriginPartition,
                NumberField::OriginOffset => Kind::OriginOffset,
                NumberField::Group => Kind::Group,
                _ => return None,
            };
            push_number(&mut term, kind, *number);
        }
        _ => return None,
    }
    Some(Query::one(&term))
}

/// The id of no template: the term of it finds nothing, where one of several alternatives matches nothing.
const NO_TEMPLATE: i64 = 0;

/// The templates whose messages can match.
fn of_message(test: &TextTest, dictionary: &Dictionary) -> Option<Query> {
    let mut ids: Vec<i64> = match test {
        TextTest::Equal(text) => dictionary.message(text).map(|(id, _)| *id).into_iter().collect(),
        TextTest::Has(needle) => {
            let found = dictionary.messages_with(needle);
            if found.are_unknown {
                return None;
            }
            found.all.iter().chain(&found.some).copied().collect()
        }
        TextTest::Present => return None,
    };
    if ids.len() > MAX_ALTERNATIVES {
        return None;
    }
    if ids.is_empty() {
        ids.push(NO_TEMPLATE);
    }
    Query::any(ids.into_iter().map(|id| {
        let mut term = String::new();
        push_number(&mut term, Kind::Template, id);
        Query::one(&term)
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::filter::{MessageMatches, parse};

    #[test]
    fn term_depends_on_name_and_value() {
        let term = |kind, name: &str, value: &str| {
            let mut term = String::new();
            push(&mut term, kind, name.as_bytes(), value.as_bytes());
            term
        };
        let terms = [
            term(Kind::Header, "a", "b"),
            term(Kind::Header, "ab", ""),
            term(Kind::Header, "", "ab"),
            term(Kind::Json, "a", "b"),
            term(Kind::Key, "", "b"),
        ];
        let distinct: std::collections::HashSet<&String> = terms.iter().collect();
        assert_eq!(distinct.len(), terms.len());
        // Terms are stored: another hash requires another version of the schema.
        assert_eq!(stable_hash([&b"a"[..], b"b"]), 0x2fa3_39c2_8692_8e8b);
        assert_eq!(term(Kind::Header, "tenant", "x"), "df6zargf ");
        assert!(terms.iter().all(|term| term.len() == TERM_LENGTH + 1));
    }

    #[test]
    fn terms_of_query_are_bounded() {
        // Each part of the message is in as many templates as are looked for.
        let conditions = |count: usize| (0..count).map(|number| format!("error_message : m{number}"));
        let mut dictionary = Dictionary::default();
        for number in 0..100 {
            let matches = MessageMatches {
                all: (0..MAX_ALTERNATIVES as i64).collect(),
                ..MessageMatches::default()
            };
            dictionary.contained.insert(format!("m{number}"), matches);
        }
        let terms = |filter: &str| {
            let query = query(&parse(filter, &[]).unwrap(), &dictionary)?;
            let words = query.split(' ');
            Some(words.filter(|word| !["AND", "OR"].contains(word)).count())
        };
        let any = |count| conditions(count).collect::<Vec<_>>().join(" OR ");
        let all = |count| conditions(count).collect::<Vec<_>>().join(" AND ");
        assert_eq!(terms(&any(4)), Some(MAX_TERMS));
        assert_eq!(terms(&any(5)), None);
        assert_eq!(terms(&any(100)), None);
        assert_eq!(terms(&all(4)), Some(MAX_TERMS));
        assert_eq!(terms(&all(100)), Some(MAX_TERMS));
        // What finds the fewest rows is not left out.
        assert_eq!(terms(&format!("key = a AND ({})", any(5))), Some(1));
        assert_eq!(
            terms(&format!("key = a AND {}", all(4))),
            Some(1 + 3 * MAX_ALTERNATIVES)
        );
    }

    #[test]
    fn query_finds_all_matching_rows() {
        let of = |filter: &str| {
            let query = query(&parse(filter, &[]).unwrap(), &Dictionary::default())?;
            // The shape, without the hashes.
            let words = query.split(' ').map(|word| {
                if word == "AND" || word == "OR" {
                    word.to_owned()
                } else {
                    word.chars().filter(|c| "()".contains(*c)).collect::<String>() + "t"
                }
            });
            Some(words.collect::<Vec<_>>().join(" "))
        };
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(of(""), None);
        assert_eq!(of("key = a"), some("t"));
        assert_eq!(
            of("key = a AND state = OPEN AND headers.x = y"),
            some("(t AND (t OR ))t")
        );
        assert_eq!(of("key = a OR headers.x = y"), some("(t OR (t OR ))t"));
        assert_eq!(of("key = a OR retry_count = 1"), None);
        assert_eq!(of("NOT key = a"), None);
        assert_eq!(of("NOT key = a AND job_id = b"), some("t"));
        assert_eq!(of("headers.x : y"), None);
        assert_eq!(of("error_code = \"\""), None);
    }
}
