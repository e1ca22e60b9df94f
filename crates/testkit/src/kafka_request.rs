//! Requests that delete topics and records, add partitions, and change configurations and permissions (Kafka protocol guide: `DeleteTopics`,
//! `DeleteRecords`, `CreatePartitions`, `AlterConfigs`, `CreateAcls` and `DeleteAcls`, all version 1, and `Metadata`, version 4).

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use crate::eventually::eventually;

const METADATA: i16 = 3;
const DELETE_TOPICS: i16 = 20;
const DELETE_RECORDS: i16 = 21;
const CREATE_ACLS: i16 = 30;
const DELETE_ACLS: i16 = 31;
const DESCRIBE_CONFIGS: i16 = 32;
const ALTER_CONFIGS: i16 = 33;
const CREATE_PARTITIONS: i16 = 37;
const TIMEOUT: i32 = 20_000;

/// Deletes a topic. The first broker does not know it any more.
///
/// # Panics
/// If the first broker refuses or does not respond, or if the topic is created again at once.
#[track_caller]
pub fn delete_topic(brokers: &str, topic: &str) {
    let mut body = Vec::new();
    body.extend(1_i32.to_be_bytes());
    push_text(&mut body, topic);
    body.extend(TIMEOUT.to_be_bytes());
    // The throttle time, one topic with its name, its error.
    let before_error = 4 + 4 + 2 + topic.len();
    if let Err(error) = ask(brokers, DELETE_TOPICS, &body, before_error) {
        panic!("deleting topic {topic}: {error:#}");
    }
    // The answer is the controller's; the broker follows.
    eventually("the topic is gone", Duration::from_secs(60), || {
        let names = topics(brokers).map_err(|error| format!("{error:#}"))?;
        if names.iter().any(|name| name == topic) {
            return Err(topic.to_owned());
        }
        Ok(())
    });
}

/// The names of all topics.
fn topics(brokers: &str) -> Result<Vec<String>> {
    let mut all = Vec::new();
    // All topics, none of which is created.
    all.extend((-1_i32).to_be_bytes());
    all.push(0);
    let answer = exchange(brokers, METADATA, 4, &all)?;
    let names = topic_names(&answer).context("reading the topics of an answer")?;
    Ok(names.into_iter().map(str::to_owned).collect())
}

/// Deletes the topics whose names contain this [unique](crate::unique()) name.
///
/// # Errors
/// If the first broker refuses or does not respond.
pub fn delete_topics_with(brokers: &str, unique: &str) -> Result<()> {
    let mut names = topics(brokers)?;
    names.retain(|name| contains(name, unique));
    if names.is_empty() {
        return Ok(());
    }
    let mut body = Vec::new();
    body.extend(
        i32::try_from(names.len())
            .context("too many topics")?
            .to_be_bytes(),
    );
    names.iter().for_each(|name| push_text(&mut body, name));
    body.extend(TIMEOUT.to_be_bytes());
    // Another program may delete some of them at the same time, so the errors of single topics do not matter.
    exchange(brokers, DELETE_TOPICS, 1, &body).map(drop)
}

/// The number at the end of a unique name must not go on: `api-1` is a part of `api-12`.
fn contains(topic: &str, unique: &str) -> bool {
    let rest = topic.split_once(unique).map(|(_, rest)| rest);
    rest.is_some_and(|rest| !rest.starts_with(|next: char| next.is_ascii_digit()))
}

/// The names in a response to Metadata, version 4.
fn topic_names(mut answer: &[u8]) -> Option<Vec<&str>> {
    fn number<const N: usize>(from: &mut &[u8]) -> Option<[u8; N]> {
        let (number, rest) = from.split_first_chunk()?;
        *from = rest;
        Some(*number)
    }
    fn count(from: &mut &[u8]) -> Option<usize> {
        usize::try_from(i32::from_be_bytes(number(from)?)).ok()
    }
    /// An absent text has the length -1.
    fn text<'a>(from: &mut &'a [u8]) -> Option<&'a str> {
        let length = usize::try_from(i16::from_be_bytes(number(from)?)).unwrap_or(0);
        let (text, rest) = from.split_at_checked(length)?;
        *from = rest;
        std::str::from_utf8(text).ok()
    }
    let from = &mut answer;
    // The correlation id and the throttle time.
    number::<8>(from)?;
    for _ in 0..count(from)? {
        number::<4>(from)?;
        text(from)?;
        number::<4>(from)?;
        text(from)?;
    }
    text(from)?;
    // The controller.
    number::<4>(from)?;
    let mut names = Vec::new();
    for _ in 0..count(from)? {
        number::<2>(from)?;
        names.push(text(from)?);
        number::<1>(from)?;
        for _ in 0..count(from)? {
            number::<10>(from)?;
            for _replicas_and_in_sync in 0..2 {
                let numbers = 4 * count(from)?;
                *from = from.get(numbers..)?;
            }
        }
    }
    Some(names)
}

/// Removes the records before an offset, as retention does.
///
/// # Panics
/// If the first broker refuses for 20 s, or does not respond.
#[track_caller]
pub fn delete_records(brokers: &str, topic: &str, partition: i32, before: i64) {
    let mut body = Vec::new();
    body.extend(1_i32.to_be_bytes());
    push_text(&mut body, topic);
    body.extend(1_i32.to_be_bytes());
    body.extend(partition.to_be_bytes());
    body.extend(before.to_be_bytes());
    body.extend(TIMEOUT.to_be_bytes());
    // The throttle time, one topic with its name, one partition with its number, its beginning, its error.
    let before_error = 4 + 4 + 2 + topic.len() + 4 + 4 + 8;
    // The leader of the partition knows a new cleanup policy later than the broker that describes the topic.
    eventually("the deletion of records", Duration::from_secs(20), || {
        ask(brokers, DELETE_RECORDS, &body, before_error).map_err(|error| format!("{topic}: {error:#}"))
    });
}

/// Increases the number of partitions of a topic to `count`.
///
/// # Panics
/// If the first broker refuses or does not respond.
#[track_caller]
pub fn create_partitions(brokers: &str, topic: &str, count: i32) {
    let mut body = Vec::new();
    body.extend(1_i32.to_be_bytes());
    push_text(&mut body, topic);
    body.extend(count.to_be_bytes());
    // Without assignments, the broker chooses the replicas.
    body.extend((-1_i32).to_be_bytes());
    body.extend(TIMEOUT.to_be_bytes());
    // Not only a validation.
    body.push(0);
    // The throttle time, one topic with its name, its error.
    let before_error = 4 + 4 + 2 + topic.len();
    if let Err(error) = ask(brokers, CREATE_PARTITIONS, &body, before_error) {
        panic!("growing topic {topic}: {error:#}");
    }
}

/// Replaces the configuration of a topic, and waits until the first broker has it. All other settings get the broker's defaults.
///
/// # Panics
/// If the first broker refuses or does not respond.
#[track_caller]
pub fn configure_topic(brokers: &str, topic: &str, config: &[(&str, &str)]) {
    const TOPIC: u8 = 2;
    let mut body = Vec::new();
    body.extend(1_i32.to_be_bytes());
    body.push(TOPIC);
    push_text(&mut body, topic);
    body.extend(i32::try_from(config.len()).unwrap_or(i32::MAX).to_be_bytes());
    for (name, value) in config {
        push_text(&mut body, name);
        push_text(&mut body, value);
    }
    // Not only a validation.
    body.push(0);
    // The throttle time, one topic with its error.
    if let Err(error) = ask(brokers, ALTER_CONFIGS, &body, 4 + 4) {
        panic!("configuring topic {topic}: {error:#}");
    }
    // The broker applies it a moment later.
    let mut request = Vec::new();
    request.extend(1_i32.to_be_bytes());
    request.push(TOPIC);
    push_text(&mut request, topic);
    // All settings, without where they come from.
    request.extend((-1_i32).to_be_bytes());
    request.push(0);
    eventually("the new configuration", Duration::from_secs(20), || {
        let answer =
            exchange(brokers, DESCRIBE_CONFIGS, 1, &request).map_err(|error| format!("{error:#}"))?;
        for (name, value) in config {
            let mut setting = Vec::new();
            push_text(&mut setting, name);
            push_text(&mut setting, value);
            if !answer.windows(setting.len()).any(|part| part == setting) {
                return Err(format!("{name} is not {value}"));
            }
        }
        Ok(())
    });
}

/// A permission for everybody: the codes of an operation, and whether it is denied (2) or allowed (3).
pub(crate) struct Acl {
    pub(crate) operation: u8,
    pub(crate) permission: u8,
}

/// Adds a permission for a topic.
///
/// # Errors
/// If the first broker refuses or does not respond.
pub(crate) fn create_acl(brokers: &str, topic: &str, acl: &Acl) -> Result<()> {
    change_acl(brokers, CREATE_ACLS, topic, acl)
}

/// Removes a permission for a topic.
///
/// # Errors
/// If the first broker refuses or does not respond.
pub(crate) fn delete_acl(brokers: &str, topic: &str, acl: &Acl) -> Result<()> {
    change_acl(brokers, DELETE_ACLS, topic, acl)
}

fn change_acl(brokers: &str, api: i16, topic: &str, acl: &Acl) -> Result<()> {
    const TOPIC: u8 = 2;
    const LITERAL: u8 = 3;
    let mut body = Vec::new();
    body.extend(1_i32.to_be_bytes());
    body.push(TOPIC);
    push_text(&mut body, topic);
    body.push(LITERAL);
    push_text(&mut body, "User:*");
    push_text(&mut body, "*");
    body.extend([acl.operation, acl.permission]);
    // The throttle time, one result with its error.
    ask(brokers, api, &body, 4 + 4)
}

fn push_text(body: &mut Vec<u8>, text: &str) {
    let length = i16::try_from(text.len()).unwrap_or(i16::MAX);
    body.extend(length.to_be_bytes());
    body.extend(text.as_bytes());
}

/// Sends a request of version 1. The error code in the response must be 0.
fn ask(brokers: &str, api: i16, body: &[u8], before_error: usize) -> Result<()> {
    let answer = exchange(brokers, api, 1, body)?;
    // After the correlation id.
    let error = answer.get(4 + before_error..).and_then(|rest| rest.get(..2));
    ensure!(error == Some(&[0, 0]), "the broker refused: {answer:?}");
    Ok(())
}

/// Sends a request, and returns the response from its correlation id on.
fn exchange(brokers: &str, api: i16, version: i16, body: &[u8]) -> Result<Vec<u8>> {
    let broker = brokers.split(',').next().unwrap_or_default();
    let mut stream = TcpStream::connect(broker).context("connecting")?;
    stream
        .set_read_timeout(Some(Duration::from_secs(30)))
        .context("setting a read timeout")?;
    let mut request = Vec::new();
    request.extend(api.to_be_bytes());
    request.extend(version.to_be_bytes());
    request.extend(7_i32.to_be_bytes());
    request.extend((-1_i16).to_be_bytes());
    request.extend(body);
    let size = i32::try_from(request.len()).context("a request that is too long")?;
    stream.write_all(&size.to_be_bytes()).context("sending")?;
    stream.write_all(&request).context("sending")?;
    let mut size = [0; 4];
    stream
        .read_exact(&mut size)
        .context("reading the answer's size")?;
    let size = usize::try_from(i32::from_be_bytes(size)).context("reading the answer's size")?;
    let mut answer = vec![0; size];
    stream.read_exact(&mut answer).context("reading the answer")?;
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn topics_of_other_tests_stay() {
        for name in ["api-1", "redeliver.api-1-jobs"] {
            assert!(contains(name, "api-1"), "{name}");
        }
        for name in ["api-12", "api-12-jobs", "other"] {
            assert!(!contains(name, "api-1"), "{name}");
        }
    }

    #[test]
    fn topic_names_are_read_from_metadata() {
        let mut answer = [0; 8].to_vec();
        let number = |answer: &mut Vec<u8>, number: i32| answer.extend(number.to_be_bytes());
        number(&mut answer, 1);
        number(&mut answer, 1);
        push_text(&mut answer, "localhost");
        number(&mut answer, 9092);
        answer.extend((-1_i16).to_be_bytes());
        push_text(&mut answer, "cluster");
        number(&mut answer, 1);
        number(&mut answer, 2);
        for (name, partitions) in [("first", 1), ("second", 0)] {
            answer.extend([0; 2]);
            push_text(&mut answer, name);
            answer.push(0);
            number(&mut answer, partitions);
            for _ in 0..partitions {
                answer.extend([0; 10]);
                for _replicas_and_in_sync in 0..2 {
                    number(&mut answer, 2);
                    answer.extend([0; 8]);
                }
            }
        }
        assert_eq!(topic_names(&answer), Some(vec!["first", "second"]));
        assert_eq!(topic_names(&answer[..answer.len() - 1]), None);
    }
}
