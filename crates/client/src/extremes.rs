//! Answers with extreme values in all fields: one of them must not make the others unreadable.

use std::sync::LazyLock;

use proptest::prelude::*;
use prost_reflect::{DescriptorPool, DynamicMessage, Kind, MapKey, MessageDescriptor, ReflectMessage, Value};
use redeliver_core::Timestamp;
use redeliver_core::job::JobId;
use redeliver_proto::{Message, v1};

use crate::audit::AuditEntry;
use crate::dead_letters::{DeadLetter, DeadLetterStats, Group};
use crate::jobs::Job;
use crate::redrives::Redrive;
use crate::waiting::{RecordTrace, WaitingRecord};

static POOL: LazyLock<DescriptorPool> =
    LazyLock::new(|| DescriptorPool::decode(redeliver_proto::DESCRIPTORS).unwrap());
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

fn extreme<M: Message + Default>(name: &str, seed: u64) -> M {
    let descriptor = POOL.get_message_by_name(&format!("redeliver.v1.{name}")).unwrap();
    let message = Choice(seed).message(&descriptor, 0);
    assert_eq!(message.descriptor().name(), name);
    M::decode(&*message.encode_to_vec()).unwrap()
}

proptest! {
    #[test]
    fn extreme_fields_leave_answers_readable(seed in any::<u64>()) {
        prop_assert!(DeadLetter::try_from(extreme::<v1::DeadLetter>("DeadLetter", seed)).is_ok());
        prop_assert!(WaitingRecord::try_from(extreme::<v1::WaitingRecord>("WaitingRecord", seed)).is_ok());
        prop_assert!(RecordTrace::try_from(extreme::<v1::PipelineTrace>("PipelineTrace", seed)).is_ok());
        let _ = DeadLetterStats::from(extreme::<v1::DeadLetterStats>("DeadLetterStats", seed));
        let _ = Group::from(extreme::<v1::Group>("Group", seed));
        let _ = AuditEntry::from(extreme::<v1::ListedAuditEntry>("ListedAuditEntry", seed));
        // Without the fields that only the service itself writes.
        let time = Some(prost_types::Timestamp::default());
        let job = v1::Job {
            id: JobId::new(Timestamp::from_millis(0), 0, 0).to_string(),
            state: v1::JobState::Scheduled.into(),
            scheduled_time: time,
            accepted_at: time,
            ..extreme("Job", seed)
        };
        prop_assert!(Job::try_from(job).is_ok());
        let redrive = v1::Redrive {
            kind: v1::RedriveKind::Redrive.into(),
            state: v1::RedriveState::Running.into(),
            ..extreme("Redrive", seed)
        };
        prop_assert!(Redrive::try_from(redrive).is_ok());
    }
}
