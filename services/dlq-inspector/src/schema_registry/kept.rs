//! Which schemas are kept, which are being fetched, and when the registry is not asked. No IO.

use std::collections::HashMap;
use std::time::Duration;

use redeliver_core::wait::Backoff;
use tokio::sync::watch;
use tokio::time::Instant;

use super::{Found, SchemaError};

/// Maximum number of schemas that are kept, and their approximate size in memory in bytes, unless a single one is larger.
const MAX_KEPT: usize = 500;
const MAX_KEPT_BYTES: usize = 32 << 20;
/// What an entry needs besides its schema, approximately, in bytes.
const ENTRY: usize = 500;
/// Maximum number of schemas that are being fetched, or wait for that.
const MAX_PENDING: usize = 64;
/// How long a schema that does not exist, or cannot be used, is not fetched again.
const MISSING: Duration = Duration::from_secs(30);
/// How long a schema that the registry refuses to return is not fetched again.
const REFUSED: Duration = Duration::from_secs(5);
/// How long nothing is fetched after the registry did not answer, at first and at most.
const OUTAGE: [Duration; 2] = [Duration::from_secs(5), Duration::from_secs(60)];

/// What is kept in memory.
pub(super) struct Kept {
    schemas: HashMap<u32, Entry>,
    bytes: usize,
    /// Increases with each use.
    uses: u64,
    /// The schemas that are being fetched.
    pending: HashMap<u32, Waiting>,
    /// Until when nothing is fetched.
    outage: Option<Instant>,
    backoff: Backoff,
}

struct Entry {
    found: Found,
    bytes: usize,
    /// Until when a failure is remembered.
    until: Option<Instant>,
    last_use: u64,
}

/// Waits for a schema that is being fetched.
pub(super) type Waiting = watch::Receiver<Option<Found>>;

/// What is known of a schema.
pub(super) enum Known {
    Found(Found),
    Pending(Waiting),
    /// It has to be fetched, for all that wait.
    Unknown(watch::Sender<Option<Found>>, Waiting),
}

impl Default for Kept {
    fn default() -> Self {
        let [min, max] = OUTAGE;
        Self {
            schemas: HashMap::new(),
            bytes: 0,
            uses: 0,
            pending: HashMap::new(),
            outage: None,
            backoff: Backoff::new(min, max),
        }
    }
}

impl Kept {
    pub(super) fn get(&mut self, id: u32, now: Instant) -> Known {
        self.uses += 1;
        if let Some(entry) = self.schemas.get_mut(&id)
            && entry.until.is_none_or(|until| now < until)
        {
            entry.last_use = self.uses;
            return Known::Found(entry.found.clone());
        }
        if let Some(pending) = self.pending.get(&id)
            // Otherwise, its fetch has ended without a result.
            && pending.has_changed().is_ok()
        {
            return Known::Pending(pending.clone());
        }
        if self.is_outage(now) {
            return Known::Found(Err(SchemaError::Unavailable));
        }
        if self.pending.len() >= MAX_PENDING {
            return Known::Found(Err(SchemaError::Busy));
        }
        let (sender, receiver) = watch::channel(None);
        self.pending.insert(id, receiver.clone());
        Known::Unknown(sender, receiver)
    }

    /// Keeps the result of a fetch.
    pub(super) fn add(&mut self, id: u32, found: Found, now: Instant) {
        self.pending.remove(&id);
        let until = match &found {
            Ok(_) => None,
            Err(SchemaError::Missing(_) | SchemaError::Unusable(..)) => Some(now + MISSING),
            Err(SchemaError::Refused(_)) => Some(now + REFUSED),
            Err(SchemaError::Unavailable) => {
                // Others that were fetched at the same time say the same.
                if !self.is_outage(now) {
                    self.outage = Some(now + self.backoff.next_delay());
                }
                return;
            }
            Err(SchemaError::Busy | SchemaError::Slow(_)) => return,
        };
        self.outage = None;
        self.backoff.reset();
        self.uses += 1;
        let entry = Entry {
            until,
            bytes: ENTRY + found.as_ref().map_or(0, |schema| schema.size()),
            found,
            last_use: self.uses,
        };
        self.bytes += entry.bytes;
        if let Some(previous) = self.schemas.insert(id, entry) {
            self.bytes -= previous.bytes;
        }
        while self.schemas.len() > MAX_KEPT || (self.bytes > MAX_KEPT_BYTES && self.schemas.len() > 1) {
            let oldest = self.schemas.iter().min_by_key(|(_, entry)| entry.last_use);
            let Some(oldest) = oldest.map(|(id, _)| *id) else {
                return;
            };
            if let Some(removed) = self.schemas.remove(&oldest) {
                self.bytes -= removed.bytes;
            }
        }
    }

    /// Whether nothing is fetched.
    pub(super) fn is_outage(&self, now: Instant) -> bool {
        self.outage.is_some_and(|until| now < until)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::decoding::{Schema, SchemaFormat, SchemaSource};

    /// A schema of at least this size in memory.
    fn schema(size: usize) -> Found {
        let source = SchemaSource {
            format: SchemaFormat::Avro,
            text: format!(
                r#"{{"type":"enum","name":"E","symbols":["{}"]}}"#,
                "s".repeat(size)
            ),
            references: Vec::new(),
        };
        Ok(Arc::new(Schema::parse(&source).unwrap()))
    }

    fn found(kept: &mut Kept, id: u32, now: Instant) -> Option<Found> {
        match kept.get(id, now) {
            Known::Found(found) => Some(found),
            Known::Pending(_) => None,
            Known::Unknown(..) => {
                kept.pending.remove(&id);
                None
            }
        }
    }

    #[tokio::test]
    async fn least_recently_used_schemas_are_evicted() {
        let mut kept = Kept::default();
        let now = Instant::now();
        for id in 0..u32::try_from(MAX_KEPT).unwrap() {
            kept.add(id, schema(1), now);
        }
        assert!(found(&mut kept, 0, now).is_some());
        kept.add(1_000, schema(1), now);
        assert_eq!(kept.schemas.len(), MAX_KEPT);
        assert!(found(&mut kept, 0, now).is_some() && found(&mut kept, 1, now).is_none());
        // What counts is the size in memory.
        for id in 1_001..1_005 {
            kept.add(id, schema(MAX_KEPT_BYTES / 2 - 10_000), now);
            assert!(kept.bytes <= MAX_KEPT_BYTES && found(&mut kept, id, now).is_some());
        }
        assert!(kept.schemas.len() < MAX_KEPT && found(&mut kept, 1_002, now).is_none());
        // One that is larger than all together is kept as long as no other is used.
        kept.add(1_005, schema(MAX_KEPT_BYTES), now);
        assert!(found(&mut kept, 1_005, now).is_some());
        assert_eq!(kept.schemas.len(), 1);
        // The same again.
        kept.add(1_005, schema(5), now);
        kept.add(1_006, Err(SchemaError::Missing(1_006)), now);
        let sizes = kept.schemas.values().map(|entry| entry.bytes);
        assert_eq!(sizes.sum::<usize>(), kept.bytes);
        assert_eq!(kept.schemas.len(), 2);
    }

    #[tokio::test]
    async fn failure_is_remembered_for_some_time() {
        let mut kept = Kept::default();
        let now = Instant::now();
        for (id, error, time) in [
            (1, SchemaError::Missing(1), MISSING),
            (2, SchemaError::Unusable(2, String::new()), MISSING),
            (3, SchemaError::Refused(String::new()), REFUSED),
        ] {
            kept.add(id, Err(error.clone()), now);
            assert_eq!(found(&mut kept, id, now).unwrap().unwrap_err(), error);
            assert!(found(&mut kept, id, now + time).is_none());
            // It concerns no other schema.
            assert!(found(&mut kept, 9, now).is_none());
        }
        for error in [SchemaError::Busy, SchemaError::Slow(4)] {
            kept.add(4, Err(error), now);
            assert!(found(&mut kept, 4, now).is_none());
        }
    }

    #[tokio::test]
    async fn outage_concerns_all_unknown_schemas() {
        let mut kept = Kept::default();
        let mut now = Instant::now();
        kept.add(1, schema(1), now);
        for seconds in [5, 10, 20, 40, 60, 60] {
            // Several that were fetched at the same time.
            kept.add(2, Err(SchemaError::Unavailable), now);
            kept.add(3, Err(SchemaError::Unavailable), now);
            let last = now + Duration::from_secs(seconds) - Duration::from_millis(1);
            assert_eq!(
                found(&mut kept, 4, last).unwrap().unwrap_err(),
                SchemaError::Unavailable
            );
            assert!(found(&mut kept, 1, last).unwrap().is_ok());
            now += Duration::from_secs(seconds);
            assert!(found(&mut kept, 4, now).is_none());
        }
        // Any other answer ends it.
        kept.add(5, Err(SchemaError::Missing(5)), now);
        kept.add(2, Err(SchemaError::Unavailable), now);
        assert!(found(&mut kept, 4, now + OUTAGE[0]).is_none());
    }

    #[tokio::test]
    async fn schema_is_fetched_once_for_all() {
        let mut kept = Kept::default();
        let now = Instant::now();
        let Known::Unknown(sender, _) = kept.get(1, now) else {
            panic!("nothing is known");
        };
        let Known::Pending(mut waiting) = kept.get(1, now) else {
            panic!("it is being fetched");
        };
        kept.add(1, schema(1), now);
        sender.send_replace(Some(schema(1)));
        assert!(waiting.wait_for(Option::is_some).await.is_ok());
        assert!(matches!(kept.get(1, now), Known::Found(Ok(_))));
        // The fetch has failed.
        drop(kept.get(2, now));
        assert!(matches!(kept.get(2, now), Known::Unknown(..)));
        // A limited number.
        let others: Vec<_> = (3..)
            .map_while(|id| match kept.get(id, now) {
                Known::Found(_) => None,
                other => Some(other),
            })
            .collect();
        assert_eq!(others.len(), MAX_PENDING - 1);
        assert!(matches!(
            kept.get(1_000, now),
            Known::Found(Err(SchemaError::Busy))
        ));
    }
}
