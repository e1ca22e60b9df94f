//! Who may see which dead letters. Every call is decided here: what it requires ([`required`]), which topics its caller
//! sees, and whose keys, values and headers ([`Viewer`]).
//!
//! | scope | permits |
//! |---|---|
//! | `dead-letters:read:PATTERN` | to see what is known of the dead letters of these topics, how records of their pipelines wait, and their overview |
//! | `dead-letters:payload:PATTERN` | to see their keys, values and headers with the responses of endpoints, to filter by them, and to find records of their pipelines by them |
//! | `dead-letters:unmasked:PATTERN` | to see what is masked for others, of what the other scopes show, and to filter by it |
//! | `dead-letters:operate:PATTERN` | to change groups that have dead letters in these topics only; to redrive, discard and restore dead letters of these topics, and to redrive to them; to retry waiting records of their pipelines, or have them become dead letters |
//! | `dead-letters:edit:PATTERN` | to redrive dead letters of these topics, and to edit waiting records of their pipelines, with other contents, with the other scopes for them |
//!
//! A caller that sees some topics gets the answers that it would get if there were no others. A caller that does not see
//! payloads, or not all of them, could find them out with filters, so that filters on them match only where it sees them.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::extract::ConnectInfo;
use redeliver_proto::v1::audit_service_server::SERVICE_NAME as AUDIT_SERVICE_NAME;
use redeliver_proto::v1::control_service_server::SERVICE_NAME as CONTROL_SERVICE_NAME;
use redeliver_proto::v1::dead_letter_service_server::SERVICE_NAME;
use redeliver_proto::v1::overview_service_server::SERVICE_NAME as OVERVIEW_SERVICE_NAME;
use redeliver_proto::v1::redrive_service_server::SERVICE_NAME as REDRIVE_SERVICE_NAME;
use redeliver_proto::v1::waiting_service_server::SERVICE_NAME as WAITING_SERVICE_NAME;
use redeliver_runtime::config::{Area, Verb};
use redeliver_service::control;
use redeliver_service::identity::{self, Access, CallerName, Identity, Refusal, Withdrawn};
use redeliver_service::memory_budget::Caller;
use rusqlite::Connection;
use tonic::{Request, Status};

use crate::filter::{Expr, Restriction, TextField, TextTest};
use crate::index;
use crate::masking::{Mask, Masking};

/// What each call of the audit log requires.
const OF_AUDIT: [(&str, Verb); 1] = [("ListAuditEntries", Verb::Read)];

/// What each call about redrives requires, of the topics that it is about.
const OF_REDRIVES: [(&str, Verb); 11] = [
    ("PlanRedrive", Verb::Operate),
    ("PlanEdit", Verb::Edit),
    ("StartRedrive", Verb::Operate),
    ("PauseRedrive", Verb::Operate),
    ("ResumeRedrive", Verb::Operate),
    ("CancelRedrive", Verb::Operate),
    ("SetRedriveRate", Verb::Operate),
    ("GetRedrive", Verb::Read),
    ("GetRedrivePreview", Verb::Read),
    ("ListRedrives", Verb::Read),
    ("ListRedriveItems", Verb::Read),
];

/// What each call about waiting records requires, of the dead-letter topics of their pipelines.
const OF_WAITING: [(&str, Verb); 8] = [
    ("ListWaiting", Verb::Read),
    ("GetWaitingStats", Verb::Read),
    ("TraceRecord", Verb::Read),
    ("FindRecords", Verb::Payload),
    ("GetJobOutcomes", Verb::Read),
    ("GetWaitingRecord", Verb::Read),
    ("ActOnWaitingRecords", Verb::Operate),
    ("GetWaitingActions", Verb::Read),
];

/// What each call about all pipelines requires, of their dead-letter topics.
const OF_OVERVIEW: [(&str, Verb); 2] = [("GetOverview", Verb::Read), ("WatchOverview", Verb::Read)];

/// What each call requires, of the topics that it is about.
const PERMISSIONS: [(&str, Verb); 11] = [
    ("ListDeadLetters", Verb::Read),
    ("GetDeadLetter", Verb::Read),
    ("ReadPayload", Verb::Payload),
    ("GetDeadLetterStats", Verb::Read),
    ("ListGroups", Verb::Read),
    ("GetGroup", Verb::Read),
    ("ResolveGroup", Verb::Operate),
    ("MuteGroup", Verb::Operate),
    ("ReopenGroup", Verb::Operate),
    ("AnnotateGroup", Verb::Operate),
    ("WatchDeadLetters", Verb::Read),
];

/// What the call with this path requires of any topic; `None` if no caller may make it.
pub(crate) fn required(path: &str) -> Option<(Area, Verb)> {
    let (service, method) = path.strip_prefix('/')?.split_once('/')?;
    let (area, calls) = match service {
        SERVICE_NAME => (Area::DeadLetters, &PERMISSIONS[..]),
        REDRIVE_SERVICE_NAME => (Area::DeadLetters, &OF_REDRIVES[..]),
        WAITING_SERVICE_NAME => (Area::DeadLetters, &OF_WAITING[..]),
        OVERVIEW_SERVICE_NAME => (Area::DeadLetters, &OF_OVERVIEW[..]),
        AUDIT_SERVICE_NAME => (Area::Audit, &OF_AUDIT[..]),
        CONTROL_SERVICE_NAME => return control::grpc::required(method),
        _ => return None,
    };
    let (_, verb) = calls.iter().find(|(name, _)| *name == method)?;
    Some((area, *verb))
}

/// The caller of a call. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Viewer {
    identity: Identity,
    access: Access,
    /// Whose share of the memory for answers is used.
    caller: Caller,
    reason: Arc<str>,
    masking: Arc<Masking>,
}

impl Viewer {
    /// The caller of this request, who makes it for this reason, and from whom these rules may hide something.
    pub(crate) fn of<T>(request: &Request<T>, reason: String, masking: Arc<Masking>) -> Result<Self, Status> {
        // The layer that authenticates requests has added both.
        let extensions = request.extensions();
        let (Some(identity), Some(access)) = (extensions.get(), extensions.get()) else {
            return Err(Status::internal("the request was not authenticated"));
        };
        let peer = extensions
            .get()
            .map(|ConnectInfo(address): &ConnectInfo<SocketAddr>| *address);
        Ok(Self {
            caller: Caller::of(identity, peer),
            identity: Identity::clone(identity),
            access: Access::clone(access),
            reason: reason.into(),
            masking,
        })
    }

    /// Whether the caller sees the dead letters of this topic.
    pub(crate) fn sees(&self, topic: &str) -> bool {
        self.identity.may(Area::DeadLetters, Verb::Read, Some(topic))
    }

    /// Whether the caller sees who has changed this control, such as `pipeline/docs`, and why.
    pub(crate) fn sees_control(&self, control: &str) -> bool {
        self.identity.may(Area::Control, Verb::Read, Some(control))
    }

    /// Whether the caller also sees their keys, values and headers.
    pub(crate) fn sees_payloads(&self, topic: &str) -> bool {
        self.sees(topic) && self.identity.may(Area::DeadLetters, Verb::Payload, Some(topic))
    }

    /// The caller, as it is recorded.
    pub(crate) fn name(&self) -> &CallerName {
        self.identity.name()
    }

    /// Whether the caller may have records written to this topic.
    pub(crate) fn may_write_to(&self, topic: &str) -> bool {
        self.identity.may(Area::DeadLetters, Verb::Operate, Some(topic))
    }

    /// Who shares the memory for the answers to the caller.
    pub(crate) fn caller(&self) -> &Caller {
        &self.caller
    }

    /// Why the caller makes this call, in its own words.
    pub(crate) fn reason(&self) -> &str {
        &self.reason
    }

    /// Requires that the caller may read the audit log.
    pub(crate) fn require_audit(&self) -> Result<(), Status> {
        let required = self.identity.require(Area::Audit, Verb::Read, None);
        required.map_err(|refusal| self.refuse(&refusal))
    }

    /// What is masked for the caller in this topic.
    pub(crate) fn mask(&self, topic: &str) -> Mask<'_> {
        mask(&self.identity, &self.masking, Some(topic))
    }

    /// Requires that the caller sees the dead letters of this topic, whether it exists or not.
    pub(crate) fn require(&self, topic: &str) -> Result<(), Status> {
        self.require_verb(Verb::Read, topic)
    }

    /// Requires that the caller also sees their keys, values and headers.
    pub(crate) fn require_payloads(&self, topic: &str) -> Result<(), Status> {
        self.require(topic)?;
        self.require_verb(Verb::Payload, topic)
    }

    /// Requires that the caller may change a group with dead letters in these topics: all of them, because the change is for everybody.
    /// Does not name a topic that the caller does not see.
    pub(crate) fn require_operating<'t>(&self, topics: impl Iterator<Item = &'t str>) -> Result<(), Status> {
        let may = |verb, topic: &str| self.identity.may(Area::DeadLetters, verb, Some(topic));
        let Some((verb, topic)) = lacking(may, topics) else {
            return Ok(());
        };
        let required = self.identity.require(Area::DeadLetters, verb, topic);
        required.map_err(|refusal| self.refuse(&refusal))
    }

    /// Requires that the caller sees everything that is in dead letters of this topic, so that the hashes of their contents tell him nothing.
    pub(crate) fn require_contents(&self, topic: &str) -> Result<(), Status> {
        self.require_payloads(topic)?;
        if self.mask(topic).is_empty() {
            return Ok(());
        }
        self.require_unmasked(topic)
    }

    /// Requires that the caller may have dead letters of this topic redriven with other contents. A caller
    /// must have seen what it edits.
    pub(crate) fn require_editing(&self, topic: &str) -> Result<(), Status> {
        self.require_contents(topic)?;
        self.require_verb(Verb::Edit, topic)
    }

    /// Whether the caller sees what others have changed in dead letters of this topic.
    pub(crate) fn sees_edits(&self, topic: &str) -> bool {
        let may = |verb| self.identity.may(Area::DeadLetters, verb, Some(topic));
        self.sees_payloads(topic) && may(Verb::Edit) && (self.mask(topic).is_empty() || may(Verb::Unmasked))
    }

    /// Whether the caller sees the dead letters of all topics.
    pub(crate) fn sees_all(&self) -> bool {
        self.identity.may(Area::DeadLetters, Verb::Read, None)
    }

    /// Requires a permission for all topics.
    pub(crate) fn require_all(&self, verb: Verb) -> Result<(), Status> {
        let required = self.identity.require(Area::DeadLetters, verb, None);
        required.map_err(|refusal| self.refuse(&refusal))
    }

    /// Requires that the caller may have records written to this topic.
    pub(crate) fn require_destination(&self, topic: &str) -> Result<(), Status> {
        self.require_verb(Verb::Operate, topic)
    }

    /// The topics that the caller sees, in the transaction of the connection; `None`: all of them.
    pub(crate) fn topics(&self, connection: &Connection) -> rusqlite::Result<Option<HashSet<i64>>> {
        if self.sees_all() {
            return Ok(None);
        }
        let topics = index::topics(connection)?.into_iter();
        let seen = topics.filter(|(_, topic)| self.sees(topic));
        Ok(Some(seen.map(|(id, _)| id).collect()))
    }

    /// Requires that nothing is masked for the caller in this topic.
    pub(crate) fn require_unmasked(&self, topic: &str) -> Result<(), Status> {
        self.require_verb(Verb::Unmasked, topic)
    }

    fn require_verb(&self, verb: Verb, topic: &str) -> Result<(), Status> {
        let required = self.identity.require(Area::DeadLetters, verb, Some(topic));
        required.map_err(|refusal| self.refuse(&refusal))
    }

    fn refuse(&self, refusal: &Refusal) -> Status {
        self.access.refused(refusal);
        identity::grpc::status(refusal)
    }

    /// Requires that the caller sees payloads in some topic.
    pub(crate) fn require_some_payloads(&self) -> Result<(), Status> {
        let some = self.identity.require_some(Area::DeadLetters, Verb::Payload);
        some.map_err(|refusal| self.refuse(&refusal))
    }

    /// A filter as this caller may use it. Refuses one that names a topic that the caller does not see, or that tests
    /// payloads if the caller sees none.
    pub(crate) fn limit(&self, filter: Expr) -> Result<LimitedFilter, Status> {
        for topic in named_topics(&filter) {
            self.require(topic)?;
        }
        let tests_payloads = !filter.all(&|restriction| !is_about_payload(restriction));
        if tests_payloads {
            self.require_some_payloads()?;
        }
        Ok(LimitedFilter {
            filter,
            tests_payloads,
            identity: self.identity.clone(),
            masking: self.masking.clone(),
        })
    }

    /// Completes when the caller may no longer make this call as it did.
    pub(crate) async fn withdrawn(&self) -> Withdrawn {
        self.access.withdrawn(&self.identity).await
    }
}

/// What a caller lacks to change a group with dead letters in these topics, and in which one; `None` stands for one that it does not see.
/// Only a caller that may change the group in all topics that it sees learns that there are others, whatever their names are.
fn lacking<'t>(
    may: impl Fn(Verb, &str) -> bool,
    topics: impl Iterator<Item = &'t str>,
) -> Option<(Verb, Option<&'t str>)> {
    let (seen, others): (Vec<_>, Vec<_>) = topics.partition(|topic| may(Verb::Read, topic));
    let refused = seen.into_iter().find(|topic| !may(Verb::Operate, topic));
    let refused = refused.map(|topic| (Verb::Operate, Some(topic)));
    refused.or((!others.is_empty()).then_some((Verb::Read, None)))
}

/// A filter that matches only what its caller may find.
pub(crate) struct LimitedFilter {
    filter: Expr,
    tests_payloads: bool,
    identity: Identity,
    masking: Arc<Masking>,
}

impl LimitedFilter {
    /// The filter as the caller has written it.
    pub(crate) fn written(&self) -> &Expr {
        &self.filter
    }

    /// The filter for a query in the transaction of the connection. Unless the caller may find everything, it names each topic:
    /// one that the transaction does not see, or that is not in the counters, matches nothing.
    pub(crate) fn resolve(&self, connection: &Connection) -> rusqlite::Result<Expr> {
        let mut parts = self.visible(connection)?;
        parts.push(self.filter.clone());
        Ok(match <[Expr; 1]>::try_from(parts) {
            Ok([filter]) => filter,
            Err(parts) => Expr::And(parts),
        })
    }

    /// Whether it tests what is masked in the groups of some topic.
    pub(crate) fn tests_masked(&self) -> bool {
        let mask = self.masking.all();
        !self.filter.all(&|restriction| !mask.hides_tested(restriction))
    }

    /// Whether a watch with this filter reads this topic.
    pub(crate) fn can_match_in(&self, topic: &str) -> bool {
        self.matches(Some(topic)) && self.filter.can_match_in(topic)
    }

    /// What limits a filter to the topics in which its caller may find something.
    fn visible(&self, connection: &Connection) -> rusqlite::Result<Vec<Expr>> {
        if self.matches(None) {
            return Ok(Vec::new());
        }
        let topics = index::topics(connection)?.into_iter();
        let mut topics: Vec<(i64, String)> = topics.filter(|(_, topic)| self.matches(Some(topic))).collect();
        let visible = match topics.len() {
            1 => Restriction::Text(TextField::Topic, TextTest::Equal(topics.remove(0).1)),
            _ => Restriction::TopicIn(topics),
        };
        Ok(vec![Expr::Is(visible)])
    }

    /// Whether it may match dead letters of this topic; `None` means of all topics.
    fn matches(&self, topic: Option<&str>) -> bool {
        let may = |verb| self.identity.may(Area::DeadLetters, verb, topic);
        let mask = mask(&self.identity, &self.masking, topic);
        may(Verb::Read)
            && (!self.tests_payloads || may(Verb::Payload))
            && self.filter.all(&|restriction| !mask.hides_tested(restriction))
    }
}

/// What is masked for a caller in a topic; `None` means in all topics.
fn mask<'m>(identity: &Identity, masking: &'m Masking, topic: Option<&str>) -> Mask<'m> {
    if identity.may(Area::DeadLetters, Verb::Unmasked, topic) {
        return Mask::default();
    }
    topic.map_or_else(|| masking.all(), |topic| masking.of(topic))
}

/// The topics that a filter names in full.
pub(crate) fn named_topics(filter: &Expr) -> Vec<&str> {
    match filter {
        Expr::And(parts) | Expr::Or(parts) => parts.iter().flat_map(named_topics).collect(),
        Expr::Not(inner) => named_topics(inner),
        Expr::Is(Restriction::Id(id)) => vec![&*id.topic],
        Expr::Is(Restriction::Text(TextField::Topic, TextTest::Equal(topic))) => vec![topic],
        Expr::Is(_) => Vec::new(),
    }
}

/// Whether a restriction tests what only those may see who see payloads.
fn is_about_payload(restriction: &Restriction) -> bool {
    match restriction {
        Restriction::Key(_) | Restriction::Header(..) | Restriction::Json(..) => true,
        Restriction::Id(_)
        | Restriction::Text(..)
        | Restriction::TopicIn(_)
        | Restriction::Number(..)
        | Restriction::Expiry(..) => false,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use prost_types::FileDescriptorSet;
    use redeliver_proto::Message as _;
    use redeliver_runtime::config::Scope;

    use super::*;

    #[test]
    fn every_call_has_a_permission() {
        let descriptors = FileDescriptorSet::decode(redeliver_proto::DESCRIPTORS).unwrap();
        for (of, permissions) in [
            (SERVICE_NAME, &PERMISSIONS[..]),
            (WAITING_SERVICE_NAME, &OF_WAITING[..]),
            (OVERVIEW_SERVICE_NAME, &OF_OVERVIEW[..]),
            (AUDIT_SERVICE_NAME, &OF_AUDIT[..]),
            (REDRIVE_SERVICE_NAME, &OF_REDRIVES[..]),
        ] {
            let mut calls = BTreeSet::new();
            for file in &descriptors.file {
                for service in &file.service {
                    let name = format!("{}.{}", file.package(), service.name());
                    if name == of {
                        calls.extend(service.method.iter().map(|method| method.name().to_owned()));
                    }
                }
            }
            assert!(!calls.is_empty());
            for call in &calls {
                assert!(
                    required(&format!("/{of}/{call}")).is_some(),
                    "{call} has no permission"
                );
            }
            let permitted: BTreeSet<String> =
                permissions.iter().map(|(name, _)| (*name).to_owned()).collect();
            assert_eq!(permitted, calls);
            assert_eq!(permissions.len(), calls.len(), "a call has two entries");
        }
        for path in [
            "",
            "/",
            "/redeliver.v1.JobService/ListJobs",
            "/redeliver.v1.DeadLetterService/Other",
        ] {
            assert_eq!(required(path), None, "{path}");
        }
    }

    #[test]
    fn group_change_needs_all_its_topics() {
        for (scopes, expected) in [
            (&["dead-letters:*"][..], None),
            (&["*"], None),
            (&["dead-letters:read:*-dlq", "dead-letters:operate:*-dlq"], None),
            (
                &["dead-letters:read", "dead-letters:operate:a-*"],
                Some((Verb::Operate, Some("b-dlq"))),
            ),
            (&["dead-letters:read"], Some((Verb::Operate, Some("a-dlq")))),
            // A topic that it does not see is not named.
            (
                &["dead-letters:read:a-*", "dead-letters:operate"],
                Some((Verb::Read, None)),
            ),
            (&["dead-letters:operate"], Some((Verb::Read, None))),
            (
                &["dead-letters:read", "dead-letters:payload"],
                Some((Verb::Operate, Some("a-dlq"))),
            ),
            // Whether there are other topics is not for callers that may not change the group in those that they see.
            (&["dead-letters:read:a-*"], Some((Verb::Operate, Some("a-dlq")))),
            (&["dead-letters:read:b-*"], Some((Verb::Operate, Some("b-dlq")))),
            (
                &["dead-letters:read:a-*", "dead-letters:operate:a-*"],
                Some((Verb::Read, None)),
            ),
            (
                &["dead-letters:read:b-*", "dead-letters:operate:b-*"],
                Some((Verb::Read, None)),
            ),
        ] {
            let parsed: Vec<Scope> = scopes.iter().map(|scope| scope.parse().unwrap()).collect();
            let may = |verb, topic: &str| {
                let mut scopes = parsed.iter();
                scopes.any(|scope| scope.permits(Area::DeadLetters, verb, Some(topic)))
            };
            let lacks = lacking(may, ["a-dlq", "b-dlq"].into_iter());
            assert_eq!(lacks, expected, "{scopes:?}");
        }
    }

    #[test]
    fn nested_topics_and_payloads_are_found() {
        let parse = |text: &str| crate::filter::parse(text, &["/a".to_owned()]).unwrap();
        let named =
            parse(r#"state = OPEN AND NOT (topic = "a" OR (id = "b/0/1" position.topic != c)) topic : d"#);
        assert_eq!(named_topics(&named), ["a", "b", "c"]);
        for (text, expected) in [
            ("NOT (state = OPEN OR headers.x = y)", true),
            ("pipeline = a (key : b OR dead_at:*)", true),
            ("-json./a:*", true),
            (
                "error_message : x AND value_size > 1 AND trace_id = a AND job_id = b",
                false,
            ),
        ] {
            let filter = parse(text);
            let tests = !filter.all(&|restriction| !is_about_payload(restriction));
            assert_eq!(tests, expected, "{text}");
        }
    }
}
