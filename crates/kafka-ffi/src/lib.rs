//! Parts of librdkafka's API that `rdkafka` does not expose: topic ids, the consumer groups of a cluster, the members of a
//! group, a consumer's member id, headers byte for byte, login tokens for clients that are not polled, and brokers of a mock
//! cluster. And an option of the allocator, because it needs `unsafe` as well.
//!
//! This is the only crate of the workspace that contains `unsafe` code. Its public API is safe. It returns owned values, except
//! for raw headers, which borrow from their message: no pointer of librdkafka outlives what it belongs to. Each native object has a guard that frees it. Each `unsafe` block contains one
//! call and states why it is sound.
//!
//! Requests block up to their timeout. None creates a topic, even with `auto.create.topics.enable`.

pub mod allocator;
mod headers;
mod native;
mod token;

use std::collections::BTreeMap;
use std::ffi::CString;
use std::time::Duration;

use rdkafka::bindings as rd;
use rdkafka::client::{Client, ClientContext};
use rdkafka::error::{IsError as _, RDKafkaErrorCode};

use native::{Event, Options, OwnedString, Queue, TopicNames, TopicSettings};

pub use headers::{RawHeader, raw_headers};
pub use token::{
    InvalidToken, KafkaClient, RdClient, Token, TokenPort, is_extension_name, is_extension_value,
};

/// The id of a topic. A topic that is deleted and created again under the same name gets a new id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TopicId(u128);

impl TopicId {
    /// An id from its 128 bits.
    #[must_use]
    pub const fn from_bits(bits: u128) -> Self {
        Self(bits)
    }

    /// The 128 bits of the id.
    #[must_use]
    pub fn bits(self) -> u128 {
        self.0
    }
}

/// A topic that exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TopicDescription {
    /// `None` if the broker does not support topic ids (before Kafka 2.8).
    pub id: Option<TopicId>,
    /// The number of partitions.
    pub partitions: i32,
    /// Whether all partitions have leaders.
    pub has_leaders: bool,
    /// The fewest replicas in sync of any partition that lacks some; `None` if all replicas are in sync.
    pub fewest_in_sync: Option<usize>,
    /// Whether this client may write to the topic (the operation Write); `None` if the broker does not tell (before Kafka 2.3).
    pub may_write: Option<bool>,
}

/// A consumer group as described by its coordinator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupDescription {
    /// Whether no rebalance is in progress.
    pub is_stable: bool,
    /// The members of the group.
    pub members: Vec<MemberDescription>,
}

/// The consumer groups of a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupList {
    /// The groups of the brokers that have answered and that this client may describe.
    pub groups: Vec<ListedGroup>,
    /// The error of a broker that did not list its groups; `None` if the list is complete.
    pub error: Option<RDKafkaErrorCode>,
}

/// A consumer group in a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedGroup {
    /// The name of the group.
    pub name: String,
    /// Whether the group certainly has no members.
    pub is_empty: bool,
}

/// A member of a consumer group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberDescription {
    /// `group.instance.id`; `None` for a dynamic member.
    pub instance: Option<String>,
    /// The assigned partitions.
    pub partitions: Vec<(String, i32)>,
}

/// Describes topics by name. A topic that is missing from the result does not exist or is not visible to this client. An error
/// of a single topic, such as a missing permission, does not tell whether the topic exists.
///
/// # Errors
/// The error of the broker or the client; `OperationTimedOut` if there is no answer within `timeout`.
pub fn describe_topics<C: ClientContext>(
    client: &Client<C>,
    topics: &[&str],
    timeout: Duration,
) -> Result<BTreeMap<String, Result<TopicDescription, RDKafkaErrorCode>>, RDKafkaErrorCode> {
    if topics.is_empty() {
        return Ok(BTreeMap::new());
    }
    let event = request_topics(client, topics, timeout)?;
    let mut found = BTreeMap::new();
    for topic in event.topics() {
        let error = topic.error();
        if error == rd::rd_kafka_resp_err_t::RD_KAFKA_RESP_ERR_UNKNOWN_TOPIC_OR_PART {
            continue;
        }
        let description = if error.is_error() {
            Err(error.into())
        } else {
            Ok(TopicDescription {
                id: topic.id(),
                partitions: topic.partitions(),
                has_leaders: topic.has_leaders(),
                fewest_in_sync: topic.fewest_in_sync(),
                may_write: topic.may_write(),
            })
        };
        found.insert(topic.name(), description);
    }
    Ok(found)
}

fn request_topics<C: ClientContext>(
    client: &Client<C>,
    topics: &[&str],
    timeout: Duration,
) -> Result<Event, RDKafkaErrorCode> {
    let names = c_strings(topics)?;
    let collection = TopicNames::new(&names);
    let queue = Queue::new(client);
    let options = Options::new(
        client,
        rd::rd_kafka_admin_op_t::RD_KAFKA_ADMIN_OP_DESCRIBETOPICS,
        timeout,
    )?;
    options.include_authorized_operations()?;
    // SAFETY: the client outlives the call; collection, options and queue are guards of live objects. The call copies the
    // names.
    unsafe {
        rd::rd_kafka_DescribeTopics(
            client.native_ptr(),
            collection.as_ptr(),
            options.as_ptr(),
            queue.as_ptr(),
        );
    }
    queue.wait(timeout)
}

/// `min.insync.replicas` of topics, which comes from the topic, the broker or the cluster. A topic is missing from the result if it does not exist, or if
/// this client may not read its configuration.
///
/// # Errors
/// As [`describe_topics`].
pub fn min_in_sync_replicas<C: ClientContext>(
    client: &Client<C>,
    topics: &[&str],
    timeout: Duration,
) -> Result<BTreeMap<String, usize>, RDKafkaErrorCode> {
    if topics.is_empty() {
        return Ok(BTreeMap::new());
    }
    let mut settings = TopicSettings::new(&c_strings(topics)?, c"min.insync.replicas")?;
    let queue = Queue::new(client);
    let operation = rd::rd_kafka_admin_op_t::RD_KAFKA_ADMIN_OP_DESCRIBECONFIGS;
    let options = Options::new(client, operation, timeout)?;
    let requested = settings.as_mut_slice();
    // SAFETY: the client outlives the call; settings, options and queue are guards of live objects. The call copies the
    // settings.
    unsafe {
        rd::rd_kafka_DescribeConfigs(
            client.native_ptr(),
            requested.as_mut_ptr(),
            requested.len(),
            options.as_ptr(),
            queue.as_ptr(),
        );
    }
    let found = queue.wait(timeout)?.topic_settings();
    let found = found.into_iter();
    Ok(found
        .filter_map(|(topic, value)| Some((topic, value.parse().ok()?)))
        .collect())
}

/// Describes a consumer group. A group that does not exist has no members and is not stable.
///
/// The request goes to the broker with the given id. If librdkafka 2.12 looked for the coordinator itself, and that took
/// longer than the timeout, it would release the request twice and abort the process.
///
/// # Errors
/// `NotCoordinator` if another broker is the group's coordinator; otherwise as [`describe_topics`].
pub fn describe_group<C: ClientContext>(
    client: &Client<C>,
    broker: i32,
    group: &str,
    timeout: Duration,
) -> Result<GroupDescription, RDKafkaErrorCode> {
    let names = c_strings(&[group])?;
    let mut pointers: Vec<_> = names.iter().map(|name| name.as_ptr()).collect();
    let queue = Queue::new(client);
    let operation = rd::rd_kafka_admin_op_t::RD_KAFKA_ADMIN_OP_DESCRIBECONSUMERGROUPS;
    let options = Options::new(client, operation, timeout)?;
    options.set_broker(broker)?;
    // SAFETY: the client outlives the call; names, options and queue live until it returns. The call copies the names.
    unsafe {
        rd::rd_kafka_DescribeConsumerGroups(
            client.native_ptr(),
            pointers.as_mut_ptr(),
            pointers.len(),
            options.as_ptr(),
            queue.as_ptr(),
        );
    }
    let event = queue.wait(timeout)?;
    let Some(group) = event.groups().next() else {
        return Err(RDKafkaErrorCode::Fail);
    };
    let error = group.error();
    if error.is_error() {
        return Err(error.into());
    }
    Ok(GroupDescription {
        is_stable: group.is_stable(),
        members: group.members(),
    })
}

/// The id that the group's coordinator has given to a consumer; `None` before it has joined a group. Waits for the client's
/// main thread, not for the broker.
pub fn member_id<C: ClientContext>(client: &Client<C>) -> Option<String> {
    // SAFETY: the client is live. The result is null or a string that this function owns.
    let id = unsafe { rd::rd_kafka_memberid(client.native_ptr()) };
    let id = OwnedString::new(id)?;
    Some(id.to_string()).filter(|id| !id.is_empty())
}

/// Lists the consumer groups of all brokers.
///
/// # Errors
/// As [`describe_topics`]. An error of one of several brokers is in [`GroupList::error`].
pub fn list_groups<C: ClientContext>(
    client: &Client<C>,
    timeout: Duration,
) -> Result<GroupList, RDKafkaErrorCode> {
    let queue = Queue::new(client);
    let operation = rd::rd_kafka_admin_op_t::RD_KAFKA_ADMIN_OP_LISTCONSUMERGROUPS;
    let options = Options::new(client, operation, timeout)?;
    // SAFETY: the client outlives the call; options and queue are guards of live objects.
    unsafe { rd::rd_kafka_ListConsumerGroups(client.native_ptr(), options.as_ptr(), queue.as_ptr()) };
    let event = queue.wait(timeout)?;
    Ok(GroupList {
        groups: event.listed_groups(),
        error: event.list_error().map(Into::into),
    })
}

/// Adds a broker to the mock cluster that a client has started (`test.mock.num.brokers`).
///
/// # Errors
/// If the client has no such cluster, or the cluster refuses the broker.
pub fn add_mock_broker<C: ClientContext>(client: &Client<C>, id: i32) -> Result<(), RDKafkaErrorCode> {
    // SAFETY: the client is live. The result is null or a cluster that lives as long as the client.
    let cluster = unsafe { rd::rd_kafka_handle_mock_cluster(client.native_ptr()) };
    if cluster.is_null() {
        return Err(RDKafkaErrorCode::InvalidArgument);
    }
    // SAFETY: the client, and with it the cluster, outlives the call.
    let error = unsafe { rd::rd_kafka_mock_broker_add(cluster, id) };
    if error.is_error() {
        return Err(error.into());
    }
    Ok(())
}

fn c_strings(names: &[&str]) -> Result<Vec<CString>, RDKafkaErrorCode> {
    let names = names.iter().map(|name| CString::new(*name));
    // No topic or group has a name with a NUL byte.
    names
        .collect::<Result<_, _>>()
        .map_err(|_| RDKafkaErrorCode::InvalidArgument)
}
