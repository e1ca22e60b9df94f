//! The payloads that share groups have not copied to dead letters: what is known of them, and what is at the origins.

use std::collections::BTreeMap;

use redeliver_core::{Position, Record};
use redeliver_kafka::TopicId;
use redeliver_proto::error::status;
use redeliver_proto::v1;
use tonic::{Code, Status};

use super::{Api, blocking, kafka_unavailable, shutting_down};
use crate::access::Viewer;
use crate::index::{self, IndexedLetter, IndexedSource};
use crate::redrive::job::{Job, Outcome};
use crate::redrive::omitted::{self, Restored};

/// What is known of the topics that have them.
#[derive(Debug, Default)]
pub(super) struct Sources {
    indexed: BTreeMap<String, IndexedSource>,
    /// Their ids; `None` if Kafka does not tell. Without topics that do not exist.
    current: BTreeMap<String, Option<TopicId>>,
}

impl Sources {
    /// The id of a topic, if it may be the one that had the payload of a dead letter.
    ///
    /// # Errors
    /// Why it is not read.
    pub(super) fn id(&self, topic: &str, letter: &Position) -> Result<TopicId, Outcome> {
        let current = self.current.get(topic).ok_or(Outcome::OriginRecreated)?;
        let current = current.ok_or(Outcome::PayloadOmitted)?;
        let indexed = self.indexed.get(topic);
        // Before it was listed, nothing was recorded.
        if indexed.is_some_and(|indexed| !indexed.may_have_had(current, letter)) {
            return Err(Outcome::OriginRecreated);
        }
        Ok(current)
    }
}

/// What is at the origin of a dead letter.
pub(super) struct AtOrigin {
    origin: Position,
    /// `None`: the caller may not know.
    restored: Option<Restored>,
}

impl AtOrigin {
    /// As callers see it.
    pub(super) fn state(&self) -> v1::PayloadAtOrigin {
        match &self.restored {
            None => v1::PayloadAtOrigin::NoPermission,
            Some(Ok(_)) => v1::PayloadAtOrigin::NotVerified,
            Some(Err(Outcome::OriginRecreated)) => v1::PayloadAtOrigin::Recreated,
            Some(Err(Outcome::OriginTruncated)) => v1::PayloadAtOrigin::Truncated,
            Some(Err(Outcome::OriginCompacted)) => v1::PayloadAtOrigin::Compacted,
            Some(Err(_)) => v1::PayloadAtOrigin::Unreadable,
        }
    }

    /// The dead letter with it, if there is one.
    pub(super) fn whole(&self) -> Option<&Record> {
        self.restored.as_ref()?.as_ref().ok()
    }

    /// The dead letter with it.
    ///
    /// # Errors
    /// If the caller may not see it, or why there is none.
    pub(super) fn required(self, viewer: &Viewer) -> Result<Restored, Status> {
        match self.restored {
            Some(restored) => Ok(restored),
            None => viewer
                .require_payloads(&self.origin.topic)
                .map(|()| Err(Outcome::PayloadOmitted)),
        }
    }
}

/// Why a payload cannot be read.
pub(super) fn not_there(skip: Outcome) -> Status {
    let reason = skip.as_str_name().trim_start_matches("REDRIVE_OUTCOME_");
    let text =
        format!("the share group has not copied the payload, and it is not at its origin any more: {reason}");
    status(Code::FailedPrecondition, text, "PAYLOAD_NOT_AT_ORIGIN", [])
}

impl Api {
    /// What is known of all topics that are listed.
    pub(super) async fn sources(&self) -> Result<Sources, Status> {
        let listed = self.redrives.destinations.sources();
        self.sources_of(listed.map(str::to_owned).collect()).await
    }

    async fn sources_of(&self, topics: Vec<String>) -> Result<Sources, Status> {
        if topics.is_empty() {
            return Ok(Sources::default());
        }
        let indexed = self.pool.query(index::read_sources).await;
        Ok(Sources {
            indexed: indexed?,
            current: self.current_ids(topics).await?,
        })
    }

    async fn current_ids(&self, topics: Vec<String>) -> Result<BTreeMap<String, Option<TopicId>>, Status> {
        let surveyor = self.redrives.surveyor.clone();
        let ids = blocking(move || {
            let names: Vec<&str> = topics.iter().map(String::as_str).collect();
            surveyor.ids(&names)
        });
        ids.await?.map_err(|error| kafka_unavailable(&error))
    }

    /// What is at the origin of a dead letter with this record; `None` if its share group has copied it, or its origin is not listed.
    pub(super) async fn at_origin(
        &self,
        viewer: &Viewer,
        letter: &IndexedLetter,
        record: &Record,
    ) -> Result<Option<AtOrigin>, Status> {
        let Some(origin) = self.redrives.destinations.uncopied_of(record) else {
            return Ok(None);
        };
        // As if the dead letter had been in that topic: whoever can write dead letters names any record of it.
        let restored = match viewer.require_payloads(&origin.topic).is_ok() {
            true => Some(self.read_origin(letter, record, &origin).await?),
            false => None,
        };
        Ok(Some(AtOrigin { origin, restored }))
    }

    async fn read_origin(
        &self,
        letter: &IndexedLetter,
        record: &Record,
        origin: &Position,
    ) -> Result<Restored, Status> {
        let sources = self.sources_of(vec![origin.topic.to_string()]).await?;
        match sources.id(&origin.topic, &letter.id) {
            Ok(id) => self.read_of_topic(record, origin, id).await,
            Err(skip) => Ok(Err(skip)),
        }
    }

    /// What a redrive reads at the origin of a dead letter that has no payload; `None` if it reads nothing.
    pub(super) async fn read_for(
        &self,
        viewer: &Viewer,
        job: &Job,
        record: &Record,
    ) -> Result<Option<Restored>, Status> {
        let destinations = &self.redrives.destinations;
        if let Some(origin) = destinations.uncopied_of(record) {
            let planned = job.origin_ids().get(&*origin.topic).copied();
            return match planned.filter(|_| viewer.sees(&origin.topic)) {
                Some(id) => self.read_of_topic(record, &origin, id).await.map(Some),
                // The caller may not know, or the configuration has changed since the plan.
                None => Ok(Some(Err(Outcome::PayloadOmitted))),
            };
        }
        let Some(origin) = destinations.original(&record.position.topic, &record.headers) else {
            return Ok(None);
        };
        match self.lookups.get(vec![origin]).await {
            Ok(found) => {
                let found = found.into_iter().flatten().next();
                let whole = found.and_then(|stored| omitted::restored(record, &stored.record));
                Ok(whole.map(Ok))
            }
            Err(error) if error.is_denied() => Ok(None),
            Err(error) => Err(kafka_unavailable(&error)),
        }
    }

    /// What is at an origin, if its topic has this id.
    async fn read_of_topic(
        &self,
        record: &Record,
        origin: &Position,
        id: TopicId,
    ) -> Result<Restored, Status> {
        let found = match self.lookups.find(vec![origin.clone()]).await {
            Ok(found) => found.into_iter().next().ok_or_else(shutting_down)?,
            Err(error) if error.is_denied() => return Ok(Err(Outcome::PayloadOmitted)),
            Err(error) => return Err(kafka_unavailable(&error)),
        };
        // After the record was read: then it is of that topic.
        let current = self.current_ids(vec![origin.topic.to_string()]).await?;
        let current = current.get(&*origin.topic).copied().flatten();
        let restored = omitted::uncopied(record, &found);
        Ok(omitted::of_same_topic(restored, id, current))
    }
}
