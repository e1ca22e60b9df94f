//! `PlanRedrive`: freezes what matches, and says what would be done.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use redeliver_core::{Position, redrive};
use redeliver_kafka::TopicId;
use redeliver_kafka::reader::{ReadError as KafkaReadError, TopicClient};
use redeliver_proto::convert::{from_duration, to_duration};
use redeliver_proto::error::{invalid, status};
use redeliver_proto::{Message, v1};
use sha2::{Digest as _, Sha256};
use tonic::{Code, Status};

use super::super::group_changes::check_text;
use super::super::groups::{group_id, in_group};
use super::super::origin::Sources;
use super::super::{Api, blocking, bounded, kafka_unavailable};
use super::sees;
use crate::access::Viewer;
use crate::completeness::Completeness;
use crate::filter::{Comparison, Expr, NumberField, NumberTest, Restriction};
use crate::header_list;
use crate::id::parse_id;
use crate::index::{self, Cursor, Direction, IndexedLetter, Page, PageLimit};
use crate::letter::ContentHash;
use crate::masking::Masking;
use crate::redrive::change::Change;
use crate::redrive::job::{self, CHUNK, Item, Kind, MAX_ITEMS, Outcome, TargetOptions};
use crate::redrive::jobs::Jobs;
use crate::redrive::record::{Destinations, MAX_OBSERVE};

/// The maximum number of topics to which a job writes.
const MAX_DESTINATIONS: usize = 100;
/// The maximum number of ids in a request.
const MAX_IDS: usize = 10_000;
/// The maximum size of a reason, in bytes.
const MAX_REASON: usize = 1_000;
/// The maximum size of the id of a request, in bytes.
const MAX_REQUEST_ID: usize = 100;
/// The maximum rate.
const MAX_RATE: u32 = 1_000_000;
/// The number of ids that a plan shows.
const SAMPLES: usize = 5;
/// How many dead letters are read from the index at once.
const PAGE: PageLimit = PageLimit {
    letters: 1_000,
    bytes: 4 << 20,
};
const DEFAULT_SHARE: f64 = 0.2;

/// Which dead letters.
enum Selection {
    Matching(Expr),
    /// With the hashes of their contents, as far as the caller has given them.
    Ids(Vec<(Position, Option<ContentHash>)>),
}

/// Refuses a request id that its caller has used for another request.
pub(super) fn request_id_used(id: &str) -> Status {
    let problem = format!("was used for the redrive `{id}`, which another request has planned");
    invalid("request_id", problem, "REQUEST_ID_USED", [])
}

/// What recognises a repeated request.
pub(super) struct RequestKey {
    /// The id that its caller has given it.
    id: String,
    hash: Bytes,
}

impl RequestKey {
    /// `request` has no id any more.
    pub(super) fn new(method: &str, id: String, request: &impl Message) -> Self {
        let mut hash = Sha256::new();
        hash.update(method);
        hash.update(request.encode_to_vec());
        Self {
            id,
            hash: Bytes::copy_from_slice(&hash.finalize()),
        }
    }
}

impl Api {
    pub(super) async fn plan(
        &self,
        viewer: &Viewer,
        mut request: v1::PlanRedriveRequest,
    ) -> Result<v1::Redrive, Status> {
        let problem = "must be REDRIVE, DISCARD or RESTORE";
        let kind = Kind::from_wire(request.kind());
        let kind = kind.ok_or_else(|| invalid("kind", problem, "KIND_INVALID", []))?;
        let mut spec = checked(&request)?;
        // Once the job has run, nothing is left to plan, and the repeated request would fail.
        let key = RequestKey::new("plan", std::mem::take(&mut request.request_id), &request);
        if let Some(job) = self.job_of_request(viewer, &key)? {
            return self.redrive_message(viewer, &job).await;
        }
        if request.group.is_empty() {
            // Other callers may see the job without seeing payloads.
            spec.filter = self.recorded_filter(&request.filter)?;
        }
        let completeness = self.completeness();
        // A dead letter whose state is unknown could have been redriven.
        Self::check_states(true, &completeness)?;
        let selection = self.selection(viewer, &request).await?;
        let options = TargetOptions {
            destination: request.destination.clone(),
            force: request.force,
        };
        let allowed = self.redrives.destinations.clone();
        let sources = match kind {
            Kind::Redrive => self.sources().await?,
            Kind::Discard | Kind::Restore => Sources::default(),
        };
        let mut plan = Plan::new(kind, options, allowed, self.masking.clone(), sources);
        match selection {
            Selection::Matching(filter) => {
                plan.excludes_payloads = excludes_payloads(&filter);
                self.add_matching(viewer, filter, &mut plan).await?;
            }
            Selection::Ids(ids) => self.add_ids(viewer, ids, &mut plan).await?,
        }
        let completeness = self.completeness_since(&completeness);
        Self::check_states(true, &completeness)?;
        viewer.require_operating(plan.sources.keys().map(String::as_str))?;
        for destination in plan.destinations.keys() {
            viewer.require_destination(destination)?;
        }
        plan.require_origins(viewer)?;
        if plan.items.is_empty() {
            return self.job_or_nothing(viewer, &key, &plan).await;
        }
        let mut warnings = self.warnings(&plan, viewer, &completeness).await?;
        warnings.extend(self.narrow_destinations(&plan).await?);
        let record = plan.record(spec, warnings, key);
        let mut items = plan.items;
        // So that they are read from Kafka one after the other.
        items.sort_by(|one, other| one.id.cmp(&other.id));
        self.write_job(viewer, Change::Plan(Box::new(record), items.into()))
            .await
    }

    /// The job that was planned with a request id before this plan, which has nothing to do.
    pub(super) async fn job_or_nothing(
        &self,
        viewer: &Viewer,
        key: &RequestKey,
        plan: &Plan,
    ) -> Result<v1::Redrive, Status> {
        // The job may be new, and this inspector has not read it yet.
        self.until_request(viewer, &key.id).await;
        match self.job_of_request(viewer, key)? {
            Some(job) => self.redrive_message(viewer, &job).await,
            None => Err(nothing(plan)),
        }
    }

    /// What to know before the start of a job.
    pub(super) async fn warnings(
        &self,
        plan: &Plan,
        viewer: &Viewer,
        completeness: &Completeness,
    ) -> Result<Vec<String>, Status> {
        let mut warnings = plan.warnings();
        if !self.completeness_message(completeness, viewer).complete {
            warnings.push("the index is incomplete: there may be more dead letters that match".to_owned());
        }
        warnings.extend(self.missing_destinations(plan).await?);
        Ok(warnings)
    }

    /// The id of the job that this request has planned before.
    ///
    /// # Errors
    /// If the caller has used its id for another request.
    pub(super) fn job_of_request(&self, viewer: &Viewer, key: &RequestKey) -> Result<Option<String>, Status> {
        let jobs = self.jobs()?;
        let found = jobs.of_request(viewer.name(), &key.id);
        let Some(job) = found.filter(|job| sees(viewer, job)) else {
            return Ok(None);
        };
        if job.record.request_hash != key.hash {
            return Err(request_id_used(&job.spec().id));
        }
        Ok(Some(job.spec().id.clone()))
    }

    async fn until_request(&self, viewer: &Viewer, request_id: &str) {
        if !request_id.is_empty() {
            let author = viewer.name().clone();
            let has_read = |jobs: &Jobs| jobs.of_request(&author, request_id).is_some();
            self.redrives.jobs.wait_applied(has_read).await;
        }
    }

    async fn selection(
        &self,
        viewer: &Viewer,
        request: &v1::PlanRedriveRequest,
    ) -> Result<Selection, Status> {
        let given = [
            !request.filter.is_empty(),
            request.all,
            !request.ids.is_empty(),
            !request.group.is_empty(),
            !request.retry_of.is_empty(),
        ];
        if given.into_iter().filter(|given| *given).count() != 1 {
            let problem = "set exactly one of filter, all, ids, group and retry_of";
            return Err(invalid("filter", problem, "SELECTION_INVALID", []));
        }
        if request.ids.is_empty() && !request.content_hashes.is_empty() {
            let problem = "is only for ids";
            return Err(invalid("content_hashes", problem, "CONTENT_HASHES_INVALID", []));
        }
        if !request.ids.is_empty() {
            if request.ids.len() > MAX_IDS {
                let problem = format!("has more than {MAX_IDS} entries; use a filter");
                return Err(invalid("ids", problem, "IDS_INVALID", []));
            }
            let parse = |id: &String| {
                let invalid_id =
                    |error| invalid("ids", format!("`{}` {error}", bounded(id)), "ID_INVALID", []);
                parse_id(id).map_err(invalid_id)
            };
            let ids: Vec<Position> = request.ids.iter().map(parse).collect::<Result<_, _>>()?;
            let hashes = content_hashes(request)?;
            return Ok(Selection::Ids(ids.into_iter().zip(hashes).collect()));
        }
        if !request.retry_of.is_empty() {
            let (entry, job) = self.visible_job(viewer, &request.retry_of).await?;
            if job.is_edit() {
                let problem =
                    "has edited its dead letter, which this job would redrive as it is; edit it again";
                return Err(invalid("retry_of", problem, "RETRY_OF_EDIT", []));
            }
            let mut ids = Vec::new();
            for chunk in 0..job.record.chunks {
                let outcomes = entry.outcomes(chunk).numbers();
                let items = entry.items(chunk).unwrap_or_default().into_iter().enumerate();
                let not_done =
                    items.filter(|(index, _)| outcomes.get(*index) != Some(&job::number(Outcome::Done)));
                ids.extend(not_done.map(|(_, item)| (item.id, None)));
            }
            return Ok(Selection::Ids(ids));
        }
        if !request.group.is_empty() {
            return Ok(Selection::Matching(in_group(group_id(&request.group)?)));
        }
        Ok(Selection::Matching(self.parse_filter(&request.filter)?))
    }

    async fn add_matching(&self, viewer: &Viewer, filter: Expr, plan: &mut Plan) -> Result<(), Status> {
        let state = NumberTest::Compare(Comparison::Equal, plan.kind.takes() as i64);
        let in_state = Expr::Is(Restriction::Number(NumberField::State, state));
        let filter = Arc::new(viewer.limit(Expr::And(vec![filter, in_state]))?);
        let mut after: Option<Cursor> = None;
        loop {
            let filter = filter.clone();
            let listing = self.pool.query(move |connection| {
                let filter = filter.resolve(connection)?;
                index::list(connection, &filter, Direction::Ascending, after, PAGE)
            });
            let listed = listing.await?;
            let Page { letters, has_more } = listed;
            for letter in &letters {
                if plan.items.len() >= MAX_ITEMS as usize {
                    plan.has_more = true;
                    return Ok(());
                }
                plan.add(letter);
                plan.check_destinations()?;
            }
            after = letters.last().map(IndexedLetter::cursor);
            if !has_more || after.is_none() {
                return Ok(());
            }
        }
    }

    async fn add_ids(
        &self,
        viewer: &Viewer,
        mut ids: Vec<(Position, Option<ContentHash>)>,
        plan: &mut Plan,
    ) -> Result<(), Status> {
        for (id, content) in &ids {
            viewer.require(&id.topic)?;
            if content.is_some() {
                // Guesses could be compared with the dead letter.
                viewer.require_contents(&id.topic)?;
            }
        }
        ids.sort_by(|(one, _), (other, _)| one.cmp(other));
        ids.dedup_by(|(one, _), (other, _)| one == other);
        for some in ids.chunks(CHUNK as usize) {
            let wanted = some.to_vec();
            let getting = self.pool.query(move |connection| {
                let found = wanted.iter().map(|(id, _)| index::get(connection, id));
                found.collect::<rusqlite::Result<Vec<_>>>()
            });
            let found = getting.await?;
            for ((id, content), letter) in some.iter().zip(found) {
                match letter {
                    Some(letter) if content.is_some_and(|content| content != letter.content) => {
                        plan.refuse(Outcome::Changed, id);
                    }
                    Some(letter) => {
                        plan.add(&letter);
                        plan.check_destinations()?;
                    }
                    None => plan.refuse(Outcome::Gone, id),
                }
            }
        }
        Ok(())
    }

    async fn narrow_destinations(&self, plan: &Plan) -> Result<Vec<String>, Status> {
        let topics: Vec<Arc<str>> = plan.sizes.keys().map(|topic| topic.as_str().into()).collect();
        let limits = self.redrives.surveyor.max_message_bytes(&topics).await;
        let limits = limits.map_err(|error| kafka_unavailable(&error))?;
        Ok(too_large(&plan.sizes, &limits))
    }

    async fn missing_destinations(&self, plan: &Plan) -> Result<Vec<String>, Status> {
        let (kafka, surveyor) = (self.kafka.clone(), self.redrives.surveyor.clone());
        let topics: Vec<String> = plan.destinations.keys().cloned().collect();
        let looking = blocking(move || {
            let mut warnings = Vec::new();
            if topics.is_empty() {
                return Ok(warnings);
            }
            let names: Vec<&str> = topics.iter().map(String::as_str).collect();
            let writable = surveyor.writable(&names)?;
            // The first request that is not answered ends the search.
            let existing = TopicClient::new(&kafka)?;
            for topic in topics {
                match existing.partitions(&topic) {
                    Ok(_) if writable.get(&topic) == Some(&false) => warnings.push(format!(
                        "this inspector may not write to the destination `{topic}` (Write): if it executes the job, or one with the same user, nothing is written there"
                    )),
                    Ok(_) => {}
                    Err(KafkaReadError::Missing(_)) => {
                        warnings.push(format!("the destination `{topic}` does not exist"));
                    }
                    Err(KafkaReadError::Denied(_)) => warnings.push(format!(
                        "this inspector may not see the destination `{topic}` (Describe), and so perhaps not write to it"
                    )),
                    Err(error) => return Err(error),
                }
            }
            Ok(warnings)
        });
        looking.await?.map_err(|error| kafka_unavailable(&error))
    }
}

/// Whether a filter leaves out dead letters because of their keys or headers.
fn excludes_payloads(filter: &Expr) -> bool {
    filter.negates(&|restriction| matches!(restriction, Restriction::Header(..) | Restriction::Key(_)))
}

/// The hash that each dead letter of a request must have.
fn content_hashes(request: &v1::PlanRedriveRequest) -> Result<Vec<Option<ContentHash>>, Status> {
    let hashes = &request.content_hashes;
    if hashes.is_empty() {
        return Ok(vec![None; request.ids.len()]);
    }
    let refused = |problem: &str| invalid("content_hashes", problem, "CONTENT_HASHES_INVALID", []);
    if hashes.len() != request.ids.len() {
        return Err(refused("must have as many entries as ids"));
    }
    let read = |hash: &Bytes| {
        if hash.is_empty() {
            return Ok(None);
        }
        let hash = ContentHash::try_from(&**hash);
        hash.map(Some)
            .map_err(|_| refused("has an entry that is no content_hash"))
    };
    hashes.iter().map(read).collect()
}

/// What to know about records that are larger than their destinations accept. `sizes` are those of keys and values, by destination: with the headers, the
/// records are larger.
fn too_large(sizes: &BTreeMap<String, Vec<u64>>, limits: &BTreeMap<String, u64>) -> Vec<String> {
    let warning = |(topic, sizes): (&String, &Vec<u64>)| {
        let limit = limits.get(topic)?;
        let count = sizes.iter().filter(|size| *size > limit).count();
        let text = format!(
            "{count} are larger than the destination `{topic}` accepts, unless they can be compressed (max.message.bytes {limit})"
        );
        (count > 0).then_some(text)
    };
    sizes.iter().filter_map(warning).collect()
}

/// The part of a job that follows from the request alone.
pub(super) fn checked(request: &v1::PlanRedriveRequest) -> Result<v1::Redrive, Status> {
    check_text("reason", &request.reason, MAX_REASON, "REASON_INVALID")?;
    check_text(
        "request_id",
        &request.request_id,
        MAX_REQUEST_ID,
        "REQUEST_ID_INVALID",
    )?;
    if request.rate_per_second > MAX_RATE {
        let problem = format!("must be at most {MAX_RATE}");
        return Err(invalid("rate_per_second", problem, "RATE_INVALID", []));
    }
    let share = request.max_returned_share.unwrap_or(DEFAULT_SHARE);
    if !(0.0..=1.0).contains(&share) {
        let problem = "must be a number from 0 to 1";
        return Err(invalid("max_returned_share", problem, "SHARE_INVALID", []));
    }
    let observe = request.observe.as_ref().map(|observe| {
        let observe = from_duration(observe).filter(|observe| observe.duration() <= MAX_OBSERVE);
        observe.ok_or_else(|| invalid("observe", "must be at most one day", "OBSERVE_INVALID", []))
    });
    let observe = observe.transpose()?;
    let is_redrive = request.kind() == v1::RedriveKind::Redrive;
    if !is_redrive && (!request.destination.is_empty() || request.force) {
        let problem = "is only for a redrive, and so is force";
        return Err(invalid("destination", problem, "DESTINATION_INVALID", []));
    }
    if !request.destination.is_empty() && !redeliver_core::pipeline::is_topic_name(&request.destination) {
        let problem = "is not the name of a topic";
        return Err(invalid("destination", problem, "DESTINATION_INVALID", []));
    }
    Ok(v1::Redrive {
        kind: request.kind,
        filter: if request.group.is_empty() {
            String::new()
        } else {
            format!("group = {}", request.group)
        },
        reason: request.reason.clone(),
        rate_per_second: request.rate_per_second,
        all_at_once: request.all_at_once,
        max_returned_share: share,
        observe: observe.map(to_duration),
        force: request.force,
        destination: request.destination.clone(),
        retry_of: request.retry_of.clone(),
        ..v1::Redrive::default()
    })
}

/// A plan that grows.
pub(super) struct Plan {
    kind: Kind,
    options: TargetOptions,
    allowed: Arc<Destinations>,
    masking: Arc<Masking>,
    origins_known: Sources,
    pub(super) items: Vec<Item>,
    sources: BTreeMap<String, u32>,
    pub(super) destinations: BTreeMap<String, u32>,
    /// The sizes of keys and values, by destination.
    sizes: BTreeMap<String, Vec<u64>>,
    refused: BTreeMap<Outcome, (u32, String)>,
    /// Whether its filter leaves out dead letters because of their keys or headers.
    excludes_payloads: bool,
    /// How many it might leave out if the index had all of their keys and headers.
    partly_indexed: u32,
    /// How many have come back from an earlier redrive.
    came_back: u32,
    /// How many have no payload, which is read at their origin, and have a hash of it.
    restored: u32,
    /// How many have no payload and no hash, with the id of the topic that has the payload.
    origins: BTreeMap<String, (TopicId, u32)>,
    has_more: bool,
}

impl Plan {
    pub(super) fn new(
        kind: Kind,
        options: TargetOptions,
        allowed: Arc<Destinations>,
        masking: Arc<Masking>,
        origins_known: Sources,
    ) -> Self {
        Self {
            kind,
            options,
            allowed,
            masking,
            origins_known,
            items: Vec::new(),
            sources: BTreeMap::new(),
            destinations: BTreeMap::new(),
            sizes: BTreeMap::new(),
            refused: BTreeMap::new(),
            excludes_payloads: false,
            partly_indexed: 0,
            came_back: 0,
            restored: 0,
            origins: BTreeMap::new(),
            has_more: false,
        }
    }

    pub(super) fn refuse(&mut self, skip: Outcome, id: &Position) {
        let (count, _) = self.refused.entry(skip).or_insert_with(|| (0, id.to_string()));
        *count += 1;
    }

    /// Each destination is looked up in Kafka, and is a part of the job.
    pub(super) fn check_destinations(&self) -> Result<(), Status> {
        if self.destinations.len() <= MAX_DESTINATIONS {
            return Ok(());
        }
        let text = format!(
            "the dead letters would be written to more than {MAX_DESTINATIONS} topics; narrow the filter, or set a destination"
        );
        Err(status(
            Code::FailedPrecondition,
            text,
            "TOO_MANY_DESTINATIONS",
            [],
        ))
    }

    pub(super) fn add(&mut self, letter: &IndexedLetter) {
        if letter.state != self.kind.takes() {
            return self.refuse(job::skipped_in(letter.state), &letter.id);
        }
        if self.kind == Kind::Redrive {
            let headers = header_list::decode(&letter.headers);
            let candidate = self.allowed.candidate(letter, &headers);
            let uncopied = self
                .allowed
                .uncopied(candidate.topic, &headers, candidate.is_empty);
            let id = |origin: &Position| self.origins_known.id(&origin.topic, &letter.id);
            let id = uncopied.as_ref().map(id).transpose();
            let target = self.allowed.target(candidate, &self.options);
            match id.and_then(|id| Ok((target?, id))) {
                Ok((target, id)) => {
                    if let Some((origin, id)) = uncopied.zip(id) {
                        let (_, count) = self.origins.entry(origin.topic.to_string()).or_insert((id, 0));
                        *count += 1;
                    } else {
                        self.restored += u32::from(candidate.is_restorable);
                    }
                    let topic = target.topic.to_string();
                    *self.destinations.entry(topic.clone()).or_default() += 1;
                    // A caller who sees the job sees its warnings, and so perhaps the size of what is masked.
                    let mask = self.masking.of(&letter.id.topic);
                    if !mask.has_key() && !mask.has_fields() {
                        let size = letter.key_size(&headers) + letter.value_size.unwrap_or(0);
                        self.sizes.entry(topic).or_default().push(size);
                    }
                }
                Err(skip) => return self.refuse(skip, &letter.id),
            }
            self.came_back += u32::from(redrive::count(&headers) > 0);
        }
        // As above, about what is masked.
        if self.excludes_payloads && self.masking.of(&letter.id.topic).is_empty() {
            let headers = header_list::decode(&letter.headers);
            self.partly_indexed += u32::from(letter.is_partly_indexed(&headers));
        }
        *self.sources.entry(letter.id.topic.to_string()).or_default() += 1;
        self.items.push(Item {
            id: letter.id.clone(),
            content: letter.content,
        });
    }

    fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        if self.has_more {
            warnings.push(format!(
                "more dead letters match: a plan takes the oldest {MAX_ITEMS}"
            ));
        }
        if self.partly_indexed > 0 {
            warnings.push(format!(
                "of {}, not the whole key and all headers are indexed: the filter may match only because what it excludes is missing in the index",
                self.partly_indexed
            ));
        }
        if self.came_back > 0 {
            warnings.push(format!(
                "{} have come back from an earlier redrive",
                self.came_back
            ));
        }
        if self.restored > 0 {
            warnings.push(format!(
                "the payloads of {} were left out; they are read at their origins, and those that are gone are skipped",
                self.restored
            ));
        }
        for (topic, (_, count)) in &self.origins {
            warnings.push(format!(
                "{count} have no payload: it is read from `{topic}` at the offset that each names, not verified; those whose record is gone, or whose topic was created again, are skipped"
            ));
        }
        warnings
    }

    /// Requires that the caller sees the topics from which payloads are copied.
    pub(super) fn require_origins(&self, viewer: &Viewer) -> Result<(), Status> {
        self.origins.keys().try_for_each(|topic| viewer.require(topic))
    }

    /// The job, as it is written before it has an id.
    pub(super) fn record(
        &self,
        mut spec: v1::Redrive,
        mut warnings: Vec<String>,
        key: RequestKey,
    ) -> v1::RedriveRecord {
        if self.kind == Kind::Redrive {
            let topics: Vec<&str> = self.destinations.keys().map(String::as_str).collect();
            let retries = self.allowed.retries_take(&topics);
            let wanted = spec.observe.as_ref().and_then(from_duration);
            let observe = wanted.unwrap_or_else(|| self.allowed.observe(&topics));
            if observe < retries {
                warnings.push(format!(
                    "retries can take {retries}, and the job waits for {observe} only: it will not know of all records that come back"
                ));
            }
            spec.observe = Some(to_duration(observe));
        }
        v1::RedriveRecord {
            wanted: v1::RedriveState::Planned.into(),
            request_id: key.id,
            request_hash: key.hash,
            redrive: Some(v1::Redrive {
                warnings,
                ..self.describe(spec)
            }),
            ..v1::RedriveRecord::default()
        }
    }

    /// What the plan contains.
    fn describe(&self, spec: v1::Redrive) -> v1::Redrive {
        let counts = |counts: &BTreeMap<String, u32>| {
            let counts = counts.iter();
            let counts = counts.map(|(topic, count)| v1::RedriveCount {
                topic: topic.clone(),
                count: *count,
            });
            counts.collect()
        };
        let refused = self
            .refused
            .iter()
            .map(|(skip, (count, sample))| v1::RedriveRefusal {
                reason: (*skip).into(),
                count: *count,
                sample: sample.clone(),
            });
        let origins = self.origins.iter().map(|(topic, (id, count))| v1::RedriveOrigin {
            topic: topic.clone(),
            count: *count,
            topic_id: format!("{:032x}", id.bits()),
        });
        v1::Redrive {
            has_more: self.has_more,
            total: u32::try_from(self.items.len()).unwrap_or(u32::MAX),
            sources: counts(&self.sources),
            destinations: counts(&self.destinations),
            refused: refused.collect(),
            origins: origins.collect(),
            samples: self
                .items
                .iter()
                .take(SAMPLES)
                .map(|item| item.id.to_string())
                .collect(),
            ..spec
        }
    }
}

fn nothing(plan: &Plan) -> Status {
    let refused = plan.refused.iter().map(|(skip, (count, sample))| {
        let reason = skip.as_str_name().trim_start_matches("REDRIVE_OUTCOME_");
        format!("{count} {reason}, such as `{sample}`")
    });
    let refused: Vec<String> = refused.collect();
    let text = if refused.is_empty() {
        format!("no dead letter matches that is {}", plan.kind.takes().name())
    } else {
        format!("no dead letter can be taken: {}", refused.join("; "))
    };
    status(Code::NotFound, text, "NOTHING_TO_REDRIVE", [])
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use redeliver_core::{Headers, HumanDuration, Timestamp};
    use redeliver_proto::error::reason;

    use super::*;
    use crate::config::MaskingRule;
    use crate::dialect::Facts;
    use crate::fingerprint::GroupId;
    use crate::ledger::{LedgerEntry, State};
    use crate::letter::{HASH_BYTES, MAX_KEY, headers_size};

    /// A dead letter of another framework, whose record was read from this topic.
    fn letter(offset: i64, origin: &str) -> IndexedLetter {
        let headers: Headers = [("kafka_dlt-original-topic", Some(origin.as_bytes()))]
            .into_iter()
            .collect();
        let now = Timestamp::from_millis(1_000);
        IndexedLetter {
            id: Position {
                topic: "spring-dlq".into(),
                partition: 0,
                offset,
            },
            dead_at: now,
            indexed_at: now,
            state: State::Open,
            entry: LedgerEntry::default(),
            facts: Facts::read(&headers),
            value_size: Some(7),
            content: [0; HASH_BYTES],
            group: GroupId::from_number(1),
            key: Some(Bytes::from_static(b"key")),
            record_size: 10,
            headers: header_list::encode(&headers).into(),
        }
    }

    fn plan(rules: &[MaskingRule]) -> Plan {
        let allowed = Destinations::new(&[], &["legacy-*".to_owned()], Vec::new(), 3);
        let masking = Arc::new(Masking::new(rules));
        Plan::new(
            Kind::Redrive,
            TargetOptions::default(),
            Arc::new(allowed),
            masking,
            Sources::default(),
        )
    }

    #[test]
    fn destinations_of_plan_are_limited() {
        let mut plan = plan(&[]);
        for offset in 0..300 {
            plan.add(&letter(offset, &format!("legacy-{}", offset % 100)));
        }
        assert!(plan.check_destinations().is_ok());
        plan.add(&letter(300, "legacy-100"));
        let refused = plan.check_destinations().unwrap_err();
        assert_eq!(reason(&refused).as_deref(), Some("TOO_MANY_DESTINATIONS"));
    }

    #[test]
    fn plan_hides_sizes_of_masked_records() {
        let rule = |key, fields: &[&str]| MaskingRule {
            topics: vec!["spring-*".to_owned()],
            key,
            fields: fields.iter().map(|field| field.parse().unwrap()).collect(),
            headers: vec!["tenant".to_owned()],
            messages: Vec::new(),
        };
        let sizes = |rules: &[MaskingRule]| {
            let mut plan = plan(rules);
            plan.add(&letter(1, "legacy-a"));
            assert_eq!(plan.items.len(), 1);
            plan.sizes
        };
        let known: BTreeMap<_, _> = [("legacy-a".to_owned(), vec![10])].into();
        assert_eq!((sizes(&[]), sizes(&[rule(false, &[])])), (known.clone(), known));
        for rule in [rule(true, &[]), rule(false, &["/pan"])] {
            assert_eq!(sizes(&[rule]), BTreeMap::new());
        }
    }

    #[test]
    fn large_keys_count_as_a_whole() {
        let mut large = letter(1, "legacy-a");
        let headers = header_list::decode(&large.headers);
        large.key = Some(vec![b'k'; MAX_KEY + 1].into());
        large.record_size = 200_000 + 7 + headers_size(&headers);
        let mut plan = plan(&[]);
        plan.add(&large);
        assert_eq!(plan.sizes["legacy-a"], [200_007]);
    }

    #[test]
    fn plan_warns_about_partly_indexed_letters() {
        let parsed = |filter| crate::filter::parse(filter, &[]).unwrap();
        for (filter, expected) in [
            ("headers.tenant != x", true),
            ("pipeline = a (state = OPEN OR NOT key : x)", true),
            ("headers.tenant = x pipeline != a", false),
        ] {
            assert_eq!(excludes_payloads(&parsed(filter)), expected, "{filter}");
        }
        let whole = letter(1, "legacy-a");
        let headers = header_list::decode(&whole.headers);
        let whole = IndexedLetter {
            record_size: 10 + headers_size(&headers),
            ..whole
        };
        let more_headers = IndexedLetter {
            record_size: whole.record_size + 4,
            ..whole.clone()
        };
        let warnings = |excludes_payloads| {
            let mut plan = Plan {
                excludes_payloads,
                ..plan(&[])
            };
            plan.add(&whole);
            plan.add(&more_headers);
            plan.warnings()
        };
        assert_eq!(warnings(false), [""; 0]);
        let warned = warnings(true);
        assert!(warned.len() == 1 && warned[0].starts_with("of 1, "), "{warned:?}");
    }

    #[test]
    fn plan_warns_about_too_large_records() {
        let sizes = [("a", vec![10, 101, 102]), ("b", vec![1_000]), ("c", vec![1_000])];
        let sizes = sizes.map(|(topic, sizes)| (topic.to_owned(), sizes)).into();
        // The limit of `c` is unknown.
        let limits = [("a", 100), ("b", 1_000)].map(|(topic, limit)| (topic.to_owned(), limit));
        let warnings = too_large(&sizes, &limits.into());
        assert_eq!(
            warnings,
            [
                "2 are larger than the destination `a` accepts, unless they can be compressed (max.message.bytes 100)"
            ]
        );
    }

    #[test]
    fn request_fields_are_validated() {
        let valid = || v1::PlanRedriveRequest {
            kind: v1::RedriveKind::Redrive.into(),
            ..v1::PlanRedriveRequest::default()
        };
        let checked = |change: &dyn Fn(&mut v1::PlanRedriveRequest)| {
            let mut request = valid();
            change(&mut request);
            super::checked(&request).map_err(|status| reason(&status).unwrap())
        };
        let spec = checked(&|_| {}).unwrap();
        assert_eq!((spec.max_returned_share, spec.observe), (0.2, None));
        for (change, expected) in [
            (
                &(|request: &mut v1::PlanRedriveRequest| request.reason = "x".repeat(1_001))
                    as &dyn Fn(&mut v1::PlanRedriveRequest),
                "REASON_INVALID",
            ),
            (
                &|request| request.request_id = "\u{1b}".to_owned(),
                "REQUEST_ID_INVALID",
            ),
            (&|request| request.rate_per_second = MAX_RATE + 1, "RATE_INVALID"),
            (&|request| request.max_returned_share = Some(1.1), "SHARE_INVALID"),
            (
                &|request| request.max_returned_share = Some(f64::NAN),
                "SHARE_INVALID",
            ),
            (
                &|request| request.observe = Some(to_duration(HumanDuration::from_secs(86_401))),
                "OBSERVE_INVALID",
            ),
            (
                &|request| request.destination = "../x".to_owned(),
                "DESTINATION_INVALID",
            ),
            (
                &|request| {
                    request.kind = v1::RedriveKind::Discard.into();
                    request.force = true;
                },
                "DESTINATION_INVALID",
            ),
        ] {
            assert_eq!(checked(change).unwrap_err(), expected);
        }
    }
}
