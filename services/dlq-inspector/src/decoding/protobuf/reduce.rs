//! Removes from a schema what decoding does not need, and bounds the rest.
//!
//! Schemas are what others have registered, and the library that resolves them expects those of a developer. The value of a custom option can be
//! nested as deeply as a text is long, and is read recursively. Every definition keeps its full name, so that the memory can grow with the square
//! of the length of the schema. For some fields, the library searches all extensions of a message, or all fields of a oneof.

use prost_types::{
    DescriptorProto, EnumDescriptorProto, FieldDescriptorProto, FileDescriptorProto, OneofDescriptorProto,
    UninterpretedOption,
};

/// Maximum size of all full names, in bytes.
const MAX_NAMES: usize = 8 << 20;
/// Maximum number of components of the name of a package.
const MAX_PACKAGE: usize = 64;
/// Maximum number of fields of a oneof.
const MAX_ONEOF: usize = 1_000;
/// Maximum number of extensions.
const MAX_EXTENSIONS: usize = 500;
/// What each definition needs besides its names, approximately, in bytes.
const DEFINITION: usize = 500;

/// What is left of the limits, and what the definitions need.
#[derive(Debug)]
pub(super) struct Budget {
    names: usize,
    extensions: usize,
    /// The approximate size in memory of the reduced schema, in bytes.
    pub(super) size: usize,
}

impl Default for Budget {
    fn default() -> Self {
        Self {
            names: MAX_NAMES,
            extensions: MAX_EXTENSIONS,
            size: 0,
        }
    }
}

impl Budget {
    /// Reduces a file.
    pub(super) fn reduce(&mut self, file: &mut FileDescriptorProto) -> Result<(), String> {
        file.source_code_info = None;
        // Messages do not refer to services.
        file.service.clear();
        if let Some(options) = &mut file.options {
            retain(&mut options.uninterpreted_option);
        }
        let package = file.package().to_owned();
        let components = package.split('.').count();
        if components > MAX_PACKAGE {
            return Err(format!(
                "the name of a package has more than {MAX_PACKAGE} components"
            ));
        }
        // Each component is a name, too.
        self.names(components, package.len())?;
        self.extensions(&mut file.extension, package.len())?;
        for ty in &mut file.enum_type {
            self.enumeration(ty, package.len())?;
        }
        for message in &mut file.message_type {
            self.message(message, package.len())?;
        }
        Ok(())
    }

    /// Messages are nested at most 32 levels deep.
    fn message(&mut self, message: &mut DescriptorProto, scope: usize) -> Result<(), String> {
        let scope = scope + 1 + message.name().len();
        self.names(1, scope)?;
        if let Some(options) = &mut message.options {
            retain(&mut options.uninterpreted_option);
        }
        for range in &mut message.extension_range {
            if let Some(options) = &mut range.options {
                retain(&mut options.uninterpreted_option);
            }
        }
        let mut oneofs = vec![0; message.oneof_decl.len()];
        for field in &mut message.field {
            let oneof = field.oneof_index.and_then(|index| usize::try_from(index).ok());
            if let Some(count) = oneof.and_then(|index| oneofs.get_mut(index)) {
                *count += 1;
                if *count > MAX_ONEOF {
                    return Err(format!("a oneof has more than {MAX_ONEOF} fields"));
                }
            }
            self.field(field, scope)?;
        }
        for oneof in &mut message.oneof_decl {
            self.oneof(oneof, scope)?;
        }
        self.extensions(&mut message.extension, scope)?;
        for ty in &mut message.enum_type {
            self.enumeration(ty, scope)?;
        }
        for nested in &mut message.nested_type {
            self.message(nested, scope)?;
        }
        Ok(())
    }

    fn extensions(&mut self, extensions: &mut [FieldDescriptorProto], scope: usize) -> Result<(), String> {
        let left = self.extensions.checked_sub(extensions.len());
        self.extensions = left.ok_or_else(|| format!("it has more than {MAX_EXTENSIONS} extensions"))?;
        for extension in extensions {
            self.field(extension, scope)?;
        }
        Ok(())
    }

    fn field(&mut self, field: &mut FieldDescriptorProto, scope: usize) -> Result<(), String> {
        if let Some(options) = &mut field.options {
            retain(&mut options.uninterpreted_option);
        }
        // Its type, its default value and its JSON name are kept as well.
        let texts = [
            field.name(),
            field.type_name(),
            field.default_value(),
            field.json_name(),
        ];
        let texts: usize = texts.iter().map(|text| text.len()).sum();
        self.names(1, scope + texts)
    }

    fn oneof(&mut self, oneof: &mut OneofDescriptorProto, scope: usize) -> Result<(), String> {
        if let Some(options) = &mut oneof.options {
            retain(&mut options.uninterpreted_option);
        }
        self.names(1, scope + oneof.name().len())
    }

    fn enumeration(&mut self, ty: &mut EnumDescriptorProto, scope: usize) -> Result<(), String> {
        self.names(1, scope + ty.name().len())?;
        if let Some(options) = &mut ty.options {
            retain(&mut options.uninterpreted_option);
        }
        for value in &mut ty.value {
            if let Some(options) = &mut value.options {
                retain(&mut options.uninterpreted_option);
            }
            self.names(1, scope + value.name().len())?;
        }
        Ok(())
    }

    /// Counts names of at most this length.
    fn names(&mut self, count: usize, length: usize) -> Result<(), String> {
        let size = count.saturating_mul(length);
        let left = self.names.checked_sub(size);
        self.names = left.ok_or_else(|| format!("the full names in it have more than {MAX_NAMES} bytes"))?;
        self.size += size + count * DEFINITION;
        Ok(())
    }
}

/// Keeps the options of the language itself, such as `allow_alias`, without which a schema can be invalid.
fn retain(options: &mut Vec<UninterpretedOption>) {
    options.retain(|option| {
        let is_simple = matches!(&option.name[..], [part] if !part.is_extension);
        is_simple && option.aggregate_value.is_none()
    });
}
