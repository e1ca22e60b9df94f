//! What the index contains of a dead letter, as the configuration says.

use std::sync::Arc;
use std::time::Duration;

use redeliver_core::Record;

use super::decoder::Decoder;
use crate::decoding::Framed;
use crate::decoding_pool::DecodingPool;
use crate::json_fields::JsonFields;
use crate::letter::Letter;
use crate::masking::Masking;
use crate::schema_registry::SchemaRegistry;

/// Stands for decoded values in the settings of an index. Increase the number if the same values are decoded differently.
const DECODED: &str = "decoded values 1";

/// The settings on which the contents of an index depend.
pub(crate) struct Contents {
    json_fields: JsonFields,
    masking: Arc<Masking>,
    /// `None`: values with a schema have no fields, or no fields are indexed.
    decoder: Option<Decoder>,
}

/// What is indexed of a record.
pub(super) struct Read {
    pub(super) letter: Letter,
    /// Its value, if its fields are to be read from it after it was decoded.
    pub(super) framed: Option<Framed>,
}

impl Contents {
    /// `schemas`: for decoding values.
    pub(crate) fn new(
        json_fields: JsonFields,
        masking: Arc<Masking>,
        schemas: Option<(SchemaRegistry, DecodingPool)>,
    ) -> Self {
        let schemas = schemas.filter(|_| !json_fields.pointers().is_empty());
        Self {
            decoder: schemas.map(|(schemas, pool)| Decoder::new(schemas, pool, json_fields.clone())),
            json_fields,
            masking,
        }
    }

    /// As texts. An index with other ones is another index.
    pub(crate) fn settings(&self) -> Vec<String> {
        let pointers = self.json_fields.pointers().iter().cloned();
        let decoded = self.decoder.as_ref().map(|_| DECODED.to_owned());
        pointers.chain(decoded).chain(self.masking.of_groups()).collect()
    }

    /// Decodes values.
    pub(super) fn decoder(&self) -> Option<&Decoder> {
        self.decoder.as_ref()
    }

    /// What is indexed of a record.
    pub(super) fn read(&self, record: &Record) -> Read {
        let value = record.value.as_ref().filter(|_| self.decoder.is_some());
        let framed = value.and_then(Framed::read);
        Read {
            letter: Letter {
                // No JSON document begins with a zero byte.
                json_fields: match framed {
                    Some(_) => None,
                    None => self.json_fields.read(record.value.as_deref()),
                },
                ..Letter::read_masked(record, &self.masking.of(&record.position.topic))
            },
            framed,
        }
    }

    /// Adds the fields of these values to the letters with these indexes. What takes longer than `wait` stays undecoded for now.
    pub(super) async fn decode(&self, letters: &mut [Letter], framed: Vec<(usize, Framed)>, wait: Duration) {
        let Some(decoder) = &self.decoder else {
            return;
        };
        let (indexes, values): (Vec<usize>, Vec<Framed>) = framed.into_iter().unzip();
        let fields = decoder.fields(values, wait).await;
        for (index, fields) in indexes.into_iter().zip(fields) {
            match fields {
                Ok(fields) => letters[index].json_fields = fields,
                Err(undecoded) => letters[index].undecoded = Some(undecoded),
            }
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use redeliver_core::{Headers, Position};
    use redeliver_runtime::config::SchemaRegistryConfig;

    use super::*;
    use crate::letter::Undecoded;
    use crate::metrics::Metrics;

    pub(in crate::ingest) fn contents(pointers: &[&str], url: Option<&str>) -> Contents {
        let pointers: Vec<String> = pointers.iter().map(|pointer| (*pointer).to_owned()).collect();
        let schemas = url.map(|url| {
            let config: SchemaRegistryConfig =
                serde_json::from_value(serde_json::json!({ "url": url })).unwrap();
            let pool = DecodingPool::new();
            let metrics = Metrics::register(&mut prometheus_client::registry::Registry::default());
            (SchemaRegistry::new(&config, pool.clone(), metrics).unwrap(), pool)
        });
        Contents::new(JsonFields::new(&pointers), Arc::default(), schemas)
    }

    /// A port at which nobody listens.
    pub(in crate::ingest) const NOBODY: Option<&str> = Some("http://127.0.0.1:9");

    fn record(value: &'static [u8]) -> Record {
        Record {
            position: Position {
                topic: "t-dlq".into(),
                partition: 0,
                offset: 0,
            },
            timestamp: None,
            key: None,
            value: Some(value.into()),
            headers: Headers::default(),
            unreadable_headers: 0,
        }
    }

    #[test]
    fn an_index_with_decoded_fields_is_another_one_than_without() {
        let settings = |pointers, url| contents(pointers, url).settings();
        assert_eq!(settings(&["/a"], NOBODY), ["/a", DECODED]);
        assert_eq!(settings(&["/a"], None), ["/a"]);
        // Without fields, nothing is decoded.
        assert_eq!(settings(&[], NOBODY), [""; 0]);
    }

    #[test]
    fn only_values_with_a_schema_are_decoded_and_only_if_there_is_a_registry() {
        let is_framed = |pointers, url, value| contents(pointers, url).read(&record(value)).framed.is_some();
        let framed = b"\0\0\0\0\x07\x02a";
        assert!(is_framed(&["/a"], NOBODY, framed));
        assert!(!is_framed(&["/a"], None, framed) && !is_framed(&[], NOBODY, framed));
        for other in [&b"\0\0\0\0"[..], b"", br#"{"a":1}"#] {
            assert!(!is_framed(&["/a"], NOBODY, other));
        }
        let plain = contents(&["/a"], NOBODY).read(&record(br#"{"a":1}"#));
        assert!(plain.letter.json_fields.is_some() && plain.letter.undecoded.is_none());
    }

    #[tokio::test]
    async fn without_an_answer_of_the_registry_a_dead_letter_says_that_its_fields_are_unknown() {
        let contents = contents(&["/a"], NOBODY);
        let [one, two] =
            [&b"\0\0\0\0\x07\x02a"[..], b"\0\0\0\0\x08"].map(|value| contents.read(&record(value)));
        let mut letters = [one.letter, two.letter];
        let framed = vec![(0, one.framed.unwrap()), (1, two.framed.unwrap())];
        contents
            .decode(&mut letters, framed, Duration::from_secs(60))
            .await;
        let undecoded = letters.map(|letter| letter.undecoded);
        assert_eq!(undecoded, [7, 8].map(|id| Some(Undecoded::Pending(id))));
    }
}
