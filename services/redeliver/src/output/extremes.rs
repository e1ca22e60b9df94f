//! Messages with extreme values in all fields: one of them must not make the others unreadable.

use prost_reflect::{DynamicMessage, Kind, MapKey, MessageDescriptor, Value};
use redeliver_client::messages;

use super::messages::{Shown, descriptor, object};

/// Deeper messages are empty.
const MAX_DEPTH: u32 = 4;

/// Chooses among extreme values.
struct Choice(u64);

impl Choice {
    fn of<T: Clone>(&mut self, values: &[T]) -> T {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let index = (self.0 >> 33) as usize % values.len();
        values[index].clone()
    }

    fn value(&mut self, kind: &Kind, depth: u32) -> Value {
        match kind {
            Kind::Double => Value::F64(self.of(&[f64::NAN, f64::INFINITY, f64::MIN, 0.0])),
            Kind::Float => Value::F32(self.of(&[f32::NAN, f32::NEG_INFINITY])),
            Kind::Int32 | Kind::Sint32 | Kind::Sfixed32 => Value::I32(self.of(&[i32::MIN, -1, i32::MAX])),
            Kind::Int64 | Kind::Sint64 | Kind::Sfixed64 => {
                Value::I64(self.of(&[i64::MIN, -1, i64::MAX, 253_402_300_800]))
            }
            Kind::Uint32 | Kind::Fixed32 => Value::U32(self.of(&[0, u32::MAX])),
            Kind::Uint64 | Kind::Fixed64 => Value::U64(self.of(&[0, u64::MAX])),
            Kind::Bool => Value::Bool(self.of(&[false, true])),
            Kind::String => Value::String(self.of(&["", "\u{0}", "\u{10ffff}", "a/-1/-1"]).to_owned()),
            Kind::Bytes => Value::Bytes(self.of(&[&b""[..], b"\xff\0"]).to_vec().into()),
            Kind::Enum(_) => Value::EnumNumber(self.of(&[i32::MIN, 0, 1, 2, i32::MAX])),
            Kind::Message(descriptor) => Value::Message(self.message(descriptor, depth + 1)),
        }
    }

    fn message(&mut self, descriptor: &MessageDescriptor, depth: u32) -> DynamicMessage {
        let mut message = DynamicMessage::new(descriptor.clone());
        for field in descriptor.fields().filter(|_| depth <= MAX_DEPTH) {
            let value = if let (true, Kind::Message(entry)) = (field.is_map(), field.kind()) {
                let of = entry.map_entry_value_field().kind();
                let entry = (MapKey::String(String::new()), self.value(&of, depth));
                Value::Map([entry].into())
            } else if field.is_list() {
                Value::List(vec![self.value(&field.kind(), depth)])
            } else {
                self.value(&field.kind(), depth)
            };
            message.set_field(&field, value);
        }
        message
    }
}

fn check<M: Shown + Default>(seed: u64) {
    let sent = Choice(seed).message(&descriptor::<M>(), 0);
    let shown = object(&sent.transcode_to::<M>().unwrap());
    assert!(!shown.is_empty(), "{sent:?}");
}

#[test]
fn extreme_fields_leave_messages_readable() {
    for seed in 0..500 {
        check::<messages::AuditEntry>(seed);
        check::<messages::DeadLetter>(seed);
        check::<messages::Group>(seed);
        check::<messages::Job>(seed);
        check::<messages::PipelineTrace>(seed);
        check::<messages::Redrive>(seed);
        check::<messages::TopicStats>(seed);
        check::<messages::WaitingCounts>(seed);
        check::<messages::WaitingRecord>(seed);
    }
}
