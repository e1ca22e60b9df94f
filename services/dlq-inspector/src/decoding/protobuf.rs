//! Protobuf messages, in the JSON mapping of Protobuf.

use std::collections::HashMap;

use prost_reflect::{DynamicMessage, FileDescriptor, MessageDescriptor, SerializeOptions};
use protox::Compiler;
use protox::file::{ChainFileResolver, File, FileResolver, GoogleFileResolver};

use super::{DecodeError, DecodedJson, JsonText, SchemaSource, zigzag};

/// The name of the schema itself, which the registry does not tell.
const FILE: &str = "redeliver.schema.proto";
/// Maximum number of indexes of a message type: each is one level of nested types.
const MAX_INDEXES: usize = 32;

/// The file with the message types.
#[derive(Debug)]
pub(super) struct Protobuf(FileDescriptor);

/// The schema and those that it refers to, by the names with which it imports them.
struct Sources(HashMap<String, String>);

impl FileResolver for Sources {
    fn open_file(&self, name: &str) -> Result<File, protox::Error> {
        match self.0.get(name) {
            Some(text) => File::from_source(name, text),
            None => Err(protox::Error::file_not_found(name)),
        }
    }
}

impl Protobuf {
    pub(super) fn parse(source: &SchemaSource) -> Result<Self, String> {
        let mut sources: HashMap<String, String> = source.references.iter().cloned().collect();
        sources.insert(FILE.to_owned(), source.text.clone());
        let mut resolver = ChainFileResolver::new();
        resolver.add(Sources(sources));
        resolver.add(GoogleFileResolver::new());
        let mut compiler = Compiler::with_file_resolver(resolver);
        compiler.include_imports(true);
        compiler.open_file(FILE).map_err(|error| error.to_string())?;
        let file = compiler.descriptor_pool().get_file_by_name(FILE);
        file.map(Self).ok_or_else(|| "it has no file".to_owned())
    }

    pub(super) fn decode(&self, payload: &[u8]) -> Result<DecodedJson, DecodeError> {
        let mut rest = payload;
        let message = self.message(&mut rest).ok_or(DecodeError::Mismatch)?;
        let name = message.full_name().to_owned();
        let message = DynamicMessage::decode(message, rest).map_err(|_| DecodeError::Mismatch)?;
        let mut json = JsonText::default();
        let mut serializer = serde_json::Serializer::new(&mut json);
        let written = message.serialize_with_options(&mut serializer, &SerializeOptions::new());
        if written.is_err() {
            return Err(json.error());
        }
        Ok(DecodedJson {
            name,
            text: json.into_text()?,
        })
    }

    /// The type of a message, from the indexes before it: the number of indexes, and then the index of the type in the file, of a type in that
    /// one, and so on. A zero stands for the first type of the file.
    fn message(&self, rest: &mut &[u8]) -> Option<MessageDescriptor> {
        let count = usize::try_from(zigzag(rest)?).ok()?;
        if count == 0 {
            return self.0.messages().next();
        }
        if count > MAX_INDEXES {
            return None;
        }
        let first = usize::try_from(zigzag(rest)?).ok()?;
        let mut message = self.0.messages().nth(first)?;
        for _ in 1..count {
            let index = usize::try_from(zigzag(rest)?).ok()?;
            let nested = message.child_messages().nth(index);
            message = nested?;
        }
        Some(message)
    }
}
