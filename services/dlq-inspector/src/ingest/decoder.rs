//! Decodes values with a schema for the index, and reads the configured fields of the result.
//!
//! Whoever may write to a dead-letter topic can make this take long. So it is bounded in time: what is not decoded then is decoded later, see
//! [`super::pending`].

use std::collections::{BTreeSet, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::{StreamExt as _, stream};
use tokio::time::{Instant, timeout_at};

use crate::decoding::{Framed, MAX_VALUE, Schema};
use crate::decoding_pool::DecodingPool;
use crate::json_fields::JsonFields;
use crate::letter::Undecoded;
use crate::schema_registry::{SchemaError, SchemaRegistry};

/// Maximum number of schemas that are asked for at the same time. Callers of the API want some, too.
const SCHEMAS: usize = 8;
/// Maximum number of values that one thread decodes before others have their turn.
const CHUNK: usize = 64;

/// The encoded fields of a value, see [`JsonFields::read`], or why they are not known.
pub(super) type Fields = Result<Option<Vec<u8>>, Undecoded>;

pub(crate) struct Decoder {
    schemas: SchemaRegistry,
    pool: DecodingPool,
    fields: Arc<JsonFields>,
}

/// A value with its schema, and its place in the list of values.
struct Decodable {
    index: usize,
    schema: Arc<Schema>,
    payload: Bytes,
}

impl Decoder {
    pub(super) fn new(schemas: SchemaRegistry, pool: DecodingPool, fields: JsonFields) -> Self {
        Self {
            schemas,
            pool,
            fields: Arc::new(fields),
        }
    }

    /// The fields of these values, in the same order. What takes longer than `wait` is pending. Each schema is looked up once.
    pub(super) async fn fields(&self, values: Vec<Framed>, wait: Duration) -> Vec<Fields> {
        let deadline = Instant::now() + wait;
        let (mut fields, mut framed) = (Vec::with_capacity(values.len()), Vec::new());
        for (index, value) in values.into_iter().enumerate() {
            if value.payload.len() > MAX_VALUE {
                fields.push(Ok(None));
            } else {
                // Until it is decoded.
                fields.push(Err(Undecoded::Pending(value.schema_id)));
                framed.push((index, value));
            }
        }
        let ids: BTreeSet<u32> = framed.iter().map(|(_, value)| value.schema_id).collect();
        let schemas: HashMap<u32, Result<Arc<Schema>, Undecoded>> = stream::iter(ids)
            .map(|id| async move { (id, self.schema(id, deadline).await) })
            .buffer_unordered(SCHEMAS)
            .collect()
            .await;
        let mut decodable = Vec::with_capacity(framed.len());
        for (index, value) in framed {
            match schemas.get(&value.schema_id) {
                Some(Ok(schema)) => decodable.push(Decodable {
                    index,
                    schema: schema.clone(),
                    payload: value.payload,
                }),
                Some(Err(undecoded)) => fields[index] = Err(*undecoded),
                None => {}
            }
        }
        let mut decodable = decodable.into_iter().peekable();
        // One after the other, so that callers of the API find a thread.
        while decodable.peek().is_some() && Instant::now() < deadline {
            let chunk: Vec<Decodable> = decodable.by_ref().take(CHUNK).collect();
            let pointers = self.fields.clone();
            let decoding = self
                .pool
                .run(move || fields_of(&pointers, chunk, deadline.into_std()));
            if let Ok(Ok(decoded)) = timeout_at(deadline, decoding).await {
                for (index, found) in decoded {
                    fields[index] = Ok(found);
                }
            }
        }
        fields
    }

    /// The schema with this id.
    pub(super) async fn schema(&self, id: u32, deadline: Instant) -> Result<Arc<Schema>, Undecoded> {
        match timeout_at(deadline, self.schemas.schema(id)).await {
            Ok(found) => found.map_err(|error| undecoded(id, &error)),
            Err(_) => Err(Undecoded::Pending(id)),
        }
    }
}

/// What it means for the fields of a value that its schema cannot be used.
fn undecoded(id: u32, error: &SchemaError) -> Undecoded {
    match error {
        // It may be registered later, or what it refers to.
        SchemaError::Missing(_) | SchemaError::Unusable(..) => Undecoded::NoSchema(id),
        // Somebody has to correct the configuration, or it ends by itself.
        SchemaError::Refused(_) | SchemaError::Unavailable | SchemaError::Slow(_) | SchemaError::Busy => {
            Undecoded::Pending(id)
        }
    }
}

/// The fields of as many values as there is time for.
fn fields_of(
    pointers: &JsonFields,
    values: Vec<Decodable>,
    deadline: std::time::Instant,
) -> Vec<(usize, Option<Vec<u8>>)> {
    let in_time = values
        .into_iter()
        .take_while(|_| std::time::Instant::now() < deadline);
    let decoded = in_time.map(|value| {
        // A decoder that panics on a value is no reason to leave out others.
        let fields = catch_unwind(AssertUnwindSafe(|| {
            // A value that does not match its schema has no fields, as one that is no JSON.
            let decoded = value.schema.decode(&value.payload).ok()?;
            pointers.read(Some(decoded.text.as_bytes()))
        }));
        (value.index, fields.unwrap_or_default())
    });
    decoded.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decoding::{SchemaFormat, SchemaSource};
    use crate::header_list;

    fn decodable(index: usize, payload: &'static [u8]) -> Decodable {
        let source = SchemaSource {
            format: SchemaFormat::Avro,
            text: r#"{"type":"record","name":"R","fields":[{"name":"id","type":"string"}]}"#.to_owned(),
            references: Vec::new(),
        };
        Decodable {
            index,
            schema: Arc::new(Schema::parse(&source).unwrap()),
            payload: payload.into(),
        }
    }

    #[test]
    fn fields_are_those_of_the_decoded_value() {
        let pointers = JsonFields::new(&["/id".to_owned()]);
        let values = || vec![decodable(3, b"\x06o-7"), decodable(5, b"\x06o")];
        let now = std::time::Instant::now();
        let found = fields_of(&pointers, values(), now + Duration::from_secs(600));
        let [(3, Some(fields)), (5, None)] = &found[..] else {
            panic!("{found:?}");
        };
        let fields: Vec<_> = header_list::iter(fields).collect();
        assert_eq!(fields, [("/id", Some(&b"o-7"[..]))]);
        // Without time, nothing is known.
        assert_eq!(fields_of(&pointers, values(), now), []);
    }

    #[test]
    fn only_what_cannot_be_used_leaves_a_value_without_fields() {
        for (error, expected) in [
            (SchemaError::Missing(7), Undecoded::NoSchema(7)),
            (SchemaError::Unusable(7, String::new()), Undecoded::NoSchema(7)),
            (SchemaError::Refused(String::new()), Undecoded::Pending(7)),
            (SchemaError::Unavailable, Undecoded::Pending(7)),
            (SchemaError::Slow(7), Undecoded::Pending(7)),
            (SchemaError::Busy, Undecoded::Pending(7)),
        ] {
            assert_eq!(undecoded(7, &error), expected);
        }
    }
}
