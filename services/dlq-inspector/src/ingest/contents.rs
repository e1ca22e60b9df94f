//! What the index contains of a dead letter, as the configuration says.

use std::sync::Arc;

use redeliver_core::Record;

use crate::json_fields::JsonFields;
use crate::letter::Letter;
use crate::masking::Masking;

/// The settings on which the contents of an index depend.
pub(crate) struct Contents {
    pub(crate) json_fields: JsonFields,
    pub(crate) masking: Arc<Masking>,
}

impl Contents {
    /// As texts. An index with other ones is another index.
    pub(crate) fn settings(&self) -> Vec<String> {
        let pointers = self.json_fields.pointers().iter().cloned();
        pointers.chain(self.masking.of_groups()).collect()
    }

    /// What is indexed of a record.
    pub(super) fn read(&self, record: &Record) -> Letter {
        Letter {
            json_fields: self.json_fields.read(record.value.as_deref()),
            ..Letter::read_masked(record, &self.masking.of(&record.position.topic))
        }
    }
}
