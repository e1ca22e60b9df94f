//! Calls of librdkafka's admin API that `rdkafka` does not expose: topic ids and the members of a consumer group.
//!
//! The only crate of the workspace that contains `unsafe` code. Everything it exports is safe and owned: no pointer of
//! librdkafka leaves a function. Every native object has a guard that frees it; every `unsafe` block is one call with
//! the reason why it is sound.
//!
//! Both calls block for up to their timeout. Neither creates a topic, whatever the broker's
//! `auto.create.topics.enable` says.

mod native;

use std::collections::BTreeMap;
use std::ffi::CString;
use std::time::Duration;

use rdkafka::bindings as rd;
use rdkafka::client::{Client, ClientContext};
use rdkafka::error::{IsError as _, RDKafkaErrorCode};

use native::{Options, Queue, TopicNames};

/// The id of a topic. A topic that is deleted and created again under its old name has another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TopicId(u128);

impl TopicId {
    /// An id from its 128 bits.
    #[must_use]
    pub fn from_bits(bits: u128) -> Self {
        Self(bits)
    }

    /// Its 128 bits.
    #[must_use]
    pub fn bits(self) -> u128 {
        self.0
    }
}

/// A topic that exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TopicDescription {
    /// `None` when the broker is too old to have topic ids (before Kafka 2.8).
    pub id: Option<TopicId>,
    /// How many partitions it has.
    pub partitions: i32,
}

/// A consumer group as its coordinator sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupDescription {
    /// Whether no rebalance is under way.
    pub is_stable: bool,
    /// Its members.
    pub members: Vec<MemberDescription>,
}

/// A member of a consumer group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberDescription {
    /// `group.instance.id`; `None` for a dynamic member.
    pub instance: Option<String>,
    /// The partitions that are assigned to it.
    pub partitions: Vec<(String, i32)>,
}

/// Looks up topics by name. A name that is missing in the result does not exist, or may not be seen. An error of a single
/// topic, such as a missing permission, says nothing about whether it exists.
///
/// # Errors
/// What the broker or the client answers; `OperationTimedOut` when neither does in time.
pub fn describe_topics<C: ClientContext>(
    client: &Client<C>,
    topics: &[&str],
    timeout: Duration,
) -> Result<BTreeMap<String, Result<TopicDescription, RDKafkaErrorCode>>, RDKafkaErrorCode> {
    if topics.is_empty() {
        return Ok(BTreeMap::new());
    }
    let names = c_strings(topics)?;
    let collection = TopicNames::new(&names);
    let queue = Queue::new(client);
    let options = Options::new(
        client,
        rd::rd_kafka_admin_op_t::RD_KAFKA_ADMIN_OP_DESCRIBETOPICS,
        timeout,
    )?;
    // SAFETY: the client outlives the call; collection, options and queue are live guards. The call copies the names.
    unsafe {
        rd::rd_kafka_DescribeTopics(
            client.native_ptr(),
            collection.as_ptr(),
            options.as_ptr(),
            queue.as_ptr(),
        );
    }
    let event = queue.wait(timeout)?;
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
            })
        };
        found.insert(topic.name(), description);
    }
    Ok(found)
}

/// Asks a broker for the members of a group. A group that does not exist has none and is not stable.
///
/// The broker is named by its id, and librdkafka is not asked to find the coordinator: when that takes longer than the
/// timeout, version 2.12 releases the request twice and ends the process.
///
/// # Errors
/// `NotCoordinator` when another broker is the group's coordinator; otherwise as [`describe_topics`].
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

fn c_strings(names: &[&str]) -> Result<Vec<CString>, RDKafkaErrorCode> {
    let names = names.iter().map(|name| CString::new(*name));
    // A name with a NUL byte exists nowhere.
    names
        .collect::<Result<_, _>>()
        .map_err(|_| RDKafkaErrorCode::InvalidArgument)
}
