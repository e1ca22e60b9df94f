//! Protobuf messages, in the JSON mapping of Protobuf.

mod reduce;
mod writer;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use prost_reflect::{DynamicMessage, FileDescriptor, MessageDescriptor};
use protox::Compiler;
use protox::file::{ChainFileResolver, File, FileResolver, GoogleFileResolver};
use reduce::Budget;

use super::{DecodeError, DecodedJson, SchemaSource, zigzag};

/// The name of the schema itself, which the registry does not tell.
const FILE: &str = "redeliver.schema.proto";
/// Maximum number of indexes of a message type: each is one level of nested types.
const MAX_INDEXES: usize = 32;

/// A compiled schema.
#[derive(Debug)]
pub(super) struct Protobuf {
    /// The file with the message types.
    file: FileDescriptor,
    size: usize,
}

/// The schema and those that it refers to, by the names with which it imports them.
struct Sources {
    texts: HashMap<String, String>,
    /// What the limits leave for the files that are opened next.
    budget: Arc<Mutex<Budget>>,
}

impl FileResolver for Sources {
    fn open_file(&self, name: &str) -> Result<File, protox::Error> {
        let Some(text) = self.texts.get(name) else {
            return Err(protox::Error::file_not_found(name));
        };
        let mut file = File::from_source(name, text)?.into();
        let mut budget = self.budget.lock().unwrap_or_else(PoisonError::into_inner);
        budget.reduce(&mut file).map_err(protox::Error::new)?;
        Ok(File::from_file_descriptor_proto(file))
    }
}

impl Protobuf {
    pub(super) fn parse(source: &SchemaSource) -> Result<Self, String> {
        let mut texts = HashMap::from([(FILE.to_owned(), source.text.clone())]);
        for (name, text) in &source.references {
            let previous = texts.insert(name.clone(), text.clone());
            if previous.is_some_and(|previous| previous != *text) {
                return Err(format!("it imports two different schemas as `{name}`"));
            }
        }
        let budget = Arc::new(Mutex::new(Budget::default()));
        let mut resolver = ChainFileResolver::new();
        resolver.add(Sources {
            texts,
            budget: budget.clone(),
        });
        resolver.add(GoogleFileResolver::new());
        let mut compiler = Compiler::with_file_resolver(resolver);
        compiler.include_imports(true);
        compiler.open_file(FILE).map_err(|error| error.to_string())?;
        let file = compiler.descriptor_pool().get_file_by_name(FILE);
        let file = file.ok_or("it has no file")?;
        let size = budget.lock().unwrap_or_else(PoisonError::into_inner).size;
        Ok(Self { file, size })
    }

    #[cfg(test)]
    pub(super) fn file(&self) -> &FileDescriptor {
        &self.file
    }

    /// See [`Schema::size`](super::Schema::size).
    pub(super) fn size(&self) -> usize {
        self.size
    }

    pub(super) fn decode(&self, payload: &[u8]) -> Result<DecodedJson, DecodeError> {
        let mut rest = payload;
        let message = self.message(&mut rest).ok_or(DecodeError::Mismatch)?;
        let name = message.full_name().to_owned();
        let message = DynamicMessage::decode(message, rest).map_err(|_| DecodeError::Mismatch)?;
        let text = writer::write(&message)?;
        Ok(DecodedJson { name, text })
    }

    /// The type of a message, from the indexes before it: the number of indexes, and then the index of the type in the file, of a type in that
    /// one, and so on. A zero stands for the first type of the file.
    fn message(&self, rest: &mut &[u8]) -> Option<MessageDescriptor> {
        let count = usize::try_from(zigzag(rest)?).ok()?;
        if count == 0 {
            return self.file.messages().next();
        }
        if count > MAX_INDEXES {
            return None;
        }
        let first = usize::try_from(zigzag(rest)?).ok()?;
        let mut message = self.file.messages().nth(first)?;
        for _ in 1..count {
            let index = usize::try_from(zigzag(rest)?).ok()?;
            let nested = message.child_messages().nth(index);
            message = nested?;
        }
        Some(message)
    }
}
