//! Guards and views of native objects. A guard frees its object; a view borrows from the event that owns it.

use std::ffi::{CStr, CString, c_char};
use std::marker::PhantomData;
use std::ptr::{self, NonNull};
use std::slice;
use std::time::Duration;

use rdkafka::bindings as rd;
use rdkafka::client::{Client, ClientContext};
use rdkafka::error::{IsError as _, RDKafkaErrorCode};

use crate::{ListedGroup, MemberDescription, TopicId};

/// Added to the timeout of a request, so that the client's own timeout error arrives first.
const SLACK: Duration = Duration::from_millis(500);

fn millis(duration: Duration) -> i32 {
    i32::try_from(duration.as_millis()).unwrap_or(i32::MAX)
}

/// A string that librdkafka has allocated.
pub(crate) struct OwnedString(NonNull<c_char>);

impl OwnedString {
    /// Takes a string that librdkafka returned; `None` for null.
    pub(crate) fn new(string: *mut c_char) -> Option<Self> {
        NonNull::new(string).map(Self)
    }
}

impl std::fmt::Display for OwnedString {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // SAFETY: the string is live and ends with NUL.
        let string = unsafe { CStr::from_ptr(self.0.as_ptr()) };
        f.write_str(&string.to_string_lossy())
    }
}

impl Drop for OwnedString {
    fn drop(&mut self) {
        // SAFETY: allocated by librdkafka, freed once. A null client stands for its global allocator.
        unsafe { rd::rd_kafka_mem_free(ptr::null_mut(), self.0.as_ptr().cast()) }
    }
}

/// A queue for the response to one request.
pub(crate) struct Queue<'c> {
    queue: NonNull<rd::rd_kafka_queue_t>,
    client: PhantomData<&'c ()>,
}

impl<'c> Queue<'c> {
    pub(crate) fn new<C: ClientContext>(client: &'c Client<C>) -> Self {
        // SAFETY: `native_ptr` of a live client is valid.
        let queue = unsafe { rd::rd_kafka_queue_new(client.native_ptr()) };
        Self {
            queue: NonNull::new(queue).expect("librdkafka aborts when it has no memory"),
            client: PhantomData,
        }
    }

    pub(crate) fn as_ptr(&self) -> *mut rd::rd_kafka_queue_t {
        self.queue.as_ptr()
    }

    /// Waits for the response. librdkafka drops a later response together with the queue.
    pub(crate) fn wait(&self, timeout: Duration) -> Result<Event, RDKafkaErrorCode> {
        // SAFETY: the queue is live, and only this function polls it.
        let event = unsafe { rd::rd_kafka_queue_poll(self.as_ptr(), millis(timeout + SLACK)) };
        let event = Event(NonNull::new(event).ok_or(RDKafkaErrorCode::OperationTimedOut)?);
        // SAFETY: the event is live.
        let error = unsafe { rd::rd_kafka_event_error(event.as_ptr()) };
        if error.is_error() {
            return Err(error.into());
        }
        Ok(event)
    }
}

impl Drop for Queue<'_> {
    fn drop(&mut self) {
        // SAFETY: created by `rd_kafka_queue_new`, freed once, before its client.
        unsafe { rd::rd_kafka_queue_destroy(self.as_ptr()) }
    }
}

/// A function that sets a numeric option. Arguments: the options, the number, a buffer for an error message and its length.
type Setter = unsafe extern "C" fn(
    *mut rd::rd_kafka_AdminOptions_t,
    i32,
    *mut c_char,
    usize,
) -> rd::rd_kafka_resp_err_t;

/// Options of an admin request.
pub(crate) struct Options(NonNull<rd::rd_kafka_AdminOptions_t>);

impl Options {
    pub(crate) fn new<C: ClientContext>(
        client: &Client<C>,
        operation: rd::rd_kafka_admin_op_t,
        timeout: Duration,
    ) -> Result<Self, RDKafkaErrorCode> {
        // SAFETY: `native_ptr` of a live client is valid.
        let options = unsafe { rd::rd_kafka_AdminOptions_new(client.native_ptr(), operation) };
        let options = Self(NonNull::new(options).expect("librdkafka aborts when it has no memory"));
        options.set(rd::rd_kafka_AdminOptions_set_request_timeout, millis(timeout))?;
        Ok(options)
    }

    /// Sends the request to this broker instead of one chosen by the client.
    pub(crate) fn set_broker(&self, broker: i32) -> Result<(), RDKafkaErrorCode> {
        self.set(rd::rd_kafka_AdminOptions_set_broker, broker)
    }

    /// Asks for the operations that the client is authorized for.
    pub(crate) fn include_authorized_operations(&self) -> Result<(), RDKafkaErrorCode> {
        // SAFETY: the options are live.
        let error = unsafe { rd::rd_kafka_AdminOptions_set_include_authorized_operations(self.as_ptr(), 1) };
        let Some(error) = NonNull::new(error) else {
            return Ok(());
        };
        let found = code(error.as_ptr());
        // SAFETY: the call has returned the error to its caller, who frees it once.
        unsafe { rd::rd_kafka_error_destroy(error.as_ptr()) };
        Err(found.into())
    }

    fn set(&self, setter: Setter, value: i32) -> Result<(), RDKafkaErrorCode> {
        let mut message = [c_char::default(); 256];
        // SAFETY: the options are live, and the buffer has the given length.
        let error = unsafe { setter(self.as_ptr(), value, message.as_mut_ptr(), message.len()) };
        if error.is_error() {
            return Err(error.into());
        }
        Ok(())
    }

    pub(crate) fn as_ptr(&self) -> *mut rd::rd_kafka_AdminOptions_t {
        self.0.as_ptr()
    }
}

impl Drop for Options {
    fn drop(&mut self) {
        // SAFETY: created by `rd_kafka_AdminOptions_new`, freed once.
        unsafe { rd::rd_kafka_AdminOptions_destroy(self.as_ptr()) }
    }
}

/// The topic names of a request.
pub(crate) struct TopicNames(NonNull<rd::rd_kafka_TopicCollection_t>);

impl TopicNames {
    pub(crate) fn new(names: &[CString]) -> Self {
        let mut pointers: Vec<_> = names.iter().map(|name| name.as_ptr()).collect();
        // SAFETY: the pointers are valid for the call, which copies the names.
        let names =
            unsafe { rd::rd_kafka_TopicCollection_of_topic_names(pointers.as_mut_ptr(), pointers.len()) };
        Self(NonNull::new(names).expect("librdkafka aborts when it has no memory"))
    }

    pub(crate) fn as_ptr(&self) -> *const rd::rd_kafka_TopicCollection_t {
        self.0.as_ptr()
    }
}

impl Drop for TopicNames {
    fn drop(&mut self) {
        // SAFETY: created by `rd_kafka_TopicCollection_of_topic_names`, freed once.
        unsafe { rd::rd_kafka_TopicCollection_destroy(self.0.as_ptr()) }
    }
}

/// Topics of whose configuration one setting is requested.
pub(crate) struct TopicSettings(Vec<*mut rd::rd_kafka_ConfigResource_t>);

impl TopicSettings {
    pub(crate) fn new(topics: &[CString], setting: &CStr) -> Result<Self, RDKafkaErrorCode> {
        let mut all = Self(Vec::with_capacity(topics.len()));
        for topic in topics {
            let kind = rd::rd_kafka_ResourceType_t::RD_KAFKA_RESOURCE_TOPIC;
            // SAFETY: the name is valid for the call, which copies it.
            let one = unsafe { rd::rd_kafka_ConfigResource_new(kind, topic.as_ptr()) };
            if one.is_null() {
                return Err(RDKafkaErrorCode::InvalidArgument);
            }
            all.0.push(one);
            // A request contains only the name, but librdkafka requires a value.
            // SAFETY: the resource is live, and the strings are valid for the call, which copies them.
            let error =
                unsafe { rd::rd_kafka_ConfigResource_set_config(one, setting.as_ptr(), c"".as_ptr()) };
            if error.is_error() {
                return Err(error.into());
            }
        }
        Ok(all)
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [*mut rd::rd_kafka_ConfigResource_t] {
        &mut self.0
    }
}

impl Drop for TopicSettings {
    fn drop(&mut self) {
        // SAFETY: each was created by `rd_kafka_ConfigResource_new`, and is freed once.
        unsafe { rd::rd_kafka_ConfigResource_destroy_array(self.0.as_mut_ptr(), self.0.len()) }
    }
}

/// A response. It owns the objects that its views point to.
pub(crate) struct Event(NonNull<rd::rd_kafka_event_t>);

impl Event {
    fn as_ptr(&self) -> *mut rd::rd_kafka_event_t {
        self.0.as_ptr()
    }

    /// The topics of a response to a request for topics; empty for other responses.
    pub(crate) fn topics(&self) -> impl Iterator<Item = Topic<'_>> {
        // SAFETY: the event is live; the result is null if the event is of another kind.
        let result = unsafe { rd::rd_kafka_event_DescribeTopics_result(self.as_ptr()) };
        let topics = elements(result, |result, count| {
            // SAFETY: the result is not null and lives as long as the event.
            unsafe { rd::rd_kafka_DescribeTopics_result_topics(result, count) }
        });
        topics.iter().map(|topic| Topic {
            topic: *topic,
            event: PhantomData,
        })
    }

    /// The groups of a response to a request for groups; empty for other responses.
    pub(crate) fn groups(&self) -> impl Iterator<Item = Group<'_>> {
        // SAFETY: the event is live; the result is null if the event is of another kind.
        let result = unsafe { rd::rd_kafka_event_DescribeConsumerGroups_result(self.as_ptr()) };
        let groups = elements(result, |result, count| {
            // SAFETY: the result is not null and lives as long as the event.
            unsafe { rd::rd_kafka_DescribeConsumerGroups_result_groups(result, count) }
        });
        groups.iter().map(|group| Group {
            group: *group,
            event: PhantomData,
        })
    }
}

impl Event {
    /// The topics of a response to a request for a setting, with its value, without those that have an error; empty for other responses.
    pub(crate) fn topic_settings(&self) -> Vec<(String, String)> {
        // SAFETY: the event is live; the result is null if the event is of another kind.
        let result = unsafe { rd::rd_kafka_event_DescribeConfigs_result(self.as_ptr()) };
        let topics = elements(result, |result, count| {
            // SAFETY: the result is not null and lives as long as the event.
            unsafe { rd::rd_kafka_DescribeConfigs_result_resources(result, count) }
        });
        let values = topics.iter().filter_map(|topic| {
            // A topic with an error has no settings.
            let settings = elements(*topic, |topic, count| {
                // SAFETY: the topic is part of the result, which lives as long as the event; `count` is valid for the call.
                unsafe { rd::rd_kafka_ConfigResource_configs(topic, count) }
            });
            // SAFETY: as above.
            let name = text(unsafe { rd::rd_kafka_ConfigResource_name(*topic) })?;
            // SAFETY: as above.
            let value = text(unsafe { rd::rd_kafka_ConfigEntry_value(*settings.first()?) })?;
            Some((name, value))
        });
        values.collect()
    }

    /// The response to a request for a list of groups; null for other responses.
    fn group_list(&self) -> *const rd::rd_kafka_ListConsumerGroups_result_t {
        // SAFETY: the event is live.
        unsafe { rd::rd_kafka_event_ListConsumerGroups_result(self.as_ptr()) }
    }

    /// The groups of a response to a request for a list; empty for other responses.
    pub(crate) fn listed_groups(&self) -> Vec<ListedGroup> {
        let groups = elements(self.group_list(), |result, count| {
            // SAFETY: the result is not null and lives as long as the event.
            unsafe { rd::rd_kafka_ListConsumerGroups_result_valid(result, count) }
        });
        let groups = groups.iter().filter_map(|group| {
            // SAFETY: the listing lives as long as the event, which is borrowed.
            let name = text(unsafe { rd::rd_kafka_ConsumerGroupListing_group_id(*group) })?;
            // SAFETY: as above.
            let state = unsafe { rd::rd_kafka_ConsumerGroupListing_state(*group) };
            let is_empty = matches!(
                state,
                rd::rd_kafka_consumer_group_state_t::RD_KAFKA_CONSUMER_GROUP_STATE_EMPTY
                    | rd::rd_kafka_consumer_group_state_t::RD_KAFKA_CONSUMER_GROUP_STATE_DEAD
            );
            Some(ListedGroup { name, is_empty })
        });
        groups.collect()
    }

    /// The error of one of the brokers of a response to a request for a list.
    pub(crate) fn list_error(&self) -> Option<rd::rd_kafka_resp_err_t> {
        let errors = elements(self.group_list(), |result, count| {
            // SAFETY: the result is not null and lives as long as the event.
            unsafe { rd::rd_kafka_ListConsumerGroups_result_errors(result, count) }
        });
        errors.first().map(|error| code(*error))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: returned by `rd_kafka_queue_poll`, which transfers ownership; freed once.
        unsafe { rd::rd_kafka_event_destroy(self.as_ptr()) }
    }
}

/// The array of a result; empty if the result is null.
fn elements<'e, R, T>(
    result: *const R,
    read: impl FnOnce(*const R, *mut usize) -> *mut *const T,
) -> &'e [*const T] {
    if result.is_null() {
        return &[];
    }
    let mut count = 0;
    let first = read(result, ptr::from_mut(&mut count));
    if first.is_null() {
        return &[];
    }
    // SAFETY: librdkafka returns `count` pointers that live as long as the result, which the caller's borrow of the
    // event outlives.
    unsafe { slice::from_raw_parts(first, count) }
}

/// Copies a string of librdkafka; `None` for null.
fn text(pointer: *const c_char) -> Option<String> {
    if pointer.is_null() {
        return None;
    }
    // SAFETY: librdkafka's strings end with NUL and live as long as the object that contains them.
    let text = unsafe { CStr::from_ptr(pointer) };
    Some(text.to_string_lossy().into_owned())
}

fn code(error: *const rd::rd_kafka_error_t) -> rd::rd_kafka_resp_err_t {
    // SAFETY: `rd_kafka_error_code` accepts null as "no error"; any other pointer points into a live event.
    unsafe { rd::rd_kafka_error_code(error) }
}

/// A topic in a response.
pub(crate) struct Topic<'e> {
    topic: *const rd::rd_kafka_TopicDescription_t,
    event: PhantomData<&'e Event>,
}

impl Topic<'_> {
    pub(crate) fn error(&self) -> rd::rd_kafka_resp_err_t {
        // SAFETY: the description lives as long as its event, which is borrowed.
        code(unsafe { rd::rd_kafka_TopicDescription_error(self.topic) })
    }

    pub(crate) fn name(&self) -> String {
        // SAFETY: as above.
        text(unsafe { rd::rd_kafka_TopicDescription_name(self.topic) }).unwrap_or_default()
    }

    /// The id; `None` if it is all zeros.
    pub(crate) fn id(&self) -> Option<TopicId> {
        // SAFETY: as above.
        let id = unsafe { rd::rd_kafka_TopicDescription_topic_id(self.topic) };
        if id.is_null() {
            return None;
        }
        // SAFETY: the id is not null and part of the description.
        let high = unsafe { rd::rd_kafka_Uuid_most_significant_bits(id) };
        // SAFETY: as above.
        let low = unsafe { rd::rd_kafka_Uuid_least_significant_bits(id) };
        let bits = u128::from(high.cast_unsigned()) << 64 | u128::from(low.cast_unsigned());
        (bits != 0).then(|| TopicId::from_bits(bits))
    }

    /// Whether the client is authorized to write; `None` if the broker does not tell.
    pub(crate) fn may_write(&self) -> Option<bool> {
        let mut count = 0;
        // SAFETY: the description lives as long as its event; `count` is valid for the call.
        let operations = unsafe {
            rd::rd_kafka_TopicDescription_authorized_operations(self.topic, ptr::from_mut(&mut count))
        };
        if operations.is_null() {
            return None;
        }
        // Numbers, because a later version of Kafka may have other operations than the enumeration.
        // SAFETY: librdkafka returns `count` numbers that live as long as the description. The enumeration is represented as u32.
        let operations = unsafe { slice::from_raw_parts(operations.cast::<u32>(), count) };
        may_write(operations)
    }

    pub(crate) fn partitions(&self) -> i32 {
        i32::try_from(self.partition_infos().len()).unwrap_or(i32::MAX)
    }

    pub(crate) fn has_leaders(&self) -> bool {
        self.partition_infos().iter().all(|partition| {
            // SAFETY: the partition is part of the description, which lives as long as its event.
            let leader = unsafe { rd::rd_kafka_TopicPartitionInfo_leader(*partition) };
            // SAFETY: the leader is not null and part of the partition.
            !leader.is_null() && unsafe { rd::rd_kafka_Node_id(leader) } >= 0
        })
    }

    pub(crate) fn fewest_in_sync(&self) -> Option<usize> {
        let partitions = self.partition_infos().iter();
        let in_sync_if_lacking = partitions.filter_map(|partition| {
            // SAFETY: the partition is part of the description, which lives as long as its event; `count` is valid for the call.
            let in_sync = elements(*partition, |partition, count| unsafe {
                rd::rd_kafka_TopicPartitionInfo_isr(partition, count)
            });
            // SAFETY: as above.
            let all = elements(*partition, |partition, count| unsafe {
                rd::rd_kafka_TopicPartitionInfo_replicas(partition, count)
            });
            (in_sync.len() < all.len()).then_some(in_sync.len())
        });
        in_sync_if_lacking.min()
    }

    fn partition_infos(&self) -> &[*const rd::rd_kafka_TopicPartitionInfo_t] {
        elements(self.topic, |topic, count| {
            // SAFETY: the description lives as long as its event; `count` is valid for the call.
            unsafe { rd::rd_kafka_TopicDescription_partitions(topic, count) }
        })
    }
}

/// Whether these operations on a topic include Write; `None` if they are not told.
fn may_write(operations: &[u32]) -> Option<bool> {
    const DESCRIBE: u32 = rd::rd_kafka_AclOperation_t::RD_KAFKA_ACL_OPERATION_DESCRIBE as u32;
    const WRITE: u32 = rd::rd_kafka_AclOperation_t::RD_KAFKA_ACL_OPERATION_WRITE as u32;
    // Without Describe, there would be no description. Some brokers send an empty set instead of none.
    operations
        .contains(&DESCRIBE)
        .then(|| operations.contains(&WRITE))
}

/// A group in a response.
pub(crate) struct Group<'e> {
    group: *const rd::rd_kafka_ConsumerGroupDescription_t,
    event: PhantomData<&'e Event>,
}

impl Group<'_> {
    pub(crate) fn error(&self) -> rd::rd_kafka_resp_err_t {
        // SAFETY: the description lives as long as its event, which is borrowed.
        code(unsafe { rd::rd_kafka_ConsumerGroupDescription_error(self.group) })
    }

    pub(crate) fn is_stable(&self) -> bool {
        // SAFETY: as above.
        let state = unsafe { rd::rd_kafka_ConsumerGroupDescription_state(self.group) };
        state == rd::rd_kafka_consumer_group_state_t::RD_KAFKA_CONSUMER_GROUP_STATE_STABLE
    }

    pub(crate) fn members(&self) -> Vec<MemberDescription> {
        // SAFETY: as above.
        let count = unsafe { rd::rd_kafka_ConsumerGroupDescription_member_count(self.group) };
        let members = (0..count).filter_map(|index| {
            // SAFETY: the index is below the count.
            let member = unsafe { rd::rd_kafka_ConsumerGroupDescription_member(self.group, index) };
            if member.is_null() {
                return None;
            }
            // SAFETY: the member is part of the description.
            let instance = unsafe { rd::rd_kafka_MemberDescription_group_instance_id(member) };
            Some(MemberDescription {
                instance: text(instance),
                partitions: partitions(member),
            })
        });
        members.collect()
    }
}

fn partitions(member: *const rd::rd_kafka_MemberDescription_t) -> Vec<(String, i32)> {
    // SAFETY: the member is not null and part of a live description.
    let assignment = unsafe { rd::rd_kafka_MemberDescription_assignment(member) };
    if assignment.is_null() {
        return Vec::new();
    }
    // SAFETY: the assignment is not null and part of the member.
    let list = unsafe { rd::rd_kafka_MemberAssignment_partitions(assignment) };
    // SAFETY: null, or a list that is part of the assignment.
    let Some(list) = (unsafe { list.as_ref() }) else {
        return Vec::new();
    };
    let (Ok(count), false) = (usize::try_from(list.cnt), list.elems.is_null()) else {
        return Vec::new();
    };
    // SAFETY: a list has `cnt` elements.
    let elements = unsafe { slice::from_raw_parts(list.elems, count) };
    elements
        .iter()
        .filter_map(|element| Some((text(element.topic)?, element.partition)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::may_write;

    #[test]
    fn operations_without_describe_tell_nothing() {
        // Read (3), Write (4) and Describe (8) in Kafka's protocol.
        assert_eq!(may_write(&[]), None);
        assert_eq!(may_write(&[3]), None);
        assert_eq!(may_write(&[3, 8]), Some(false));
        assert_eq!(may_write(&[3, 4, 8]), Some(true));
    }
}
