//! Errors injected on librdkafka's mock cluster: the recovery action of each class, and that a later transaction succeeds.

use std::sync::Arc;
use std::time::Duration;

use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::mocking::MockCluster;
use rdkafka::producer::DefaultProducerContext;
use rdkafka::topic_partition_list::Offset;
use rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};
use rdkafka::{ClientConfig, TopicPartitionList};
use redeliver_kafka::KafkaClient;
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::recovery::RecoveryAction;
use redeliver_kafka::transaction::{FailureKind, TransactionError, Transactions};
use redeliver_testkit::{DEADLINE, eventually};

use crate::support::output;

struct MockEnv {
    cluster: MockCluster<'static, DefaultProducerContext>,
    transactions: Transactions,
    consumer: KafkaClient<BaseConsumer>,
}

impl MockEnv {
    fn new() -> Self {
        Self::with_timeout(Duration::from_secs(5))
    }

    fn with_timeout(timeout: Duration) -> Self {
        let cluster = MockCluster::new(1).unwrap();
        cluster.create_topic("from", 1, 1).unwrap();
        cluster.create_topic("to", 1, 1).unwrap();
        let settings = KafkaSettings {
            transaction_timeout: timeout,
            ..KafkaSettings::new(cluster.bootstrap_servers(), "errors")
        };
        let transactions = Transactions::new(settings.transactional_producer("errors"), "errors", timeout);
        let consumer: KafkaClient<BaseConsumer> = settings.consumer("group", "member").create().unwrap();
        Self {
            cluster,
            transactions,
            consumer,
        }
    }

    fn recover(&mut self) {
        for _ in 0..100 {
            match self.transactions.recover(Duration::from_secs(1)) {
                Ok(()) => return,
                Err(error) => assert_ne!(error.action, RecoveryAction::Misconfigured, "{error}"),
            }
        }
        panic!("the producer did not recover");
    }

    fn until_written(&mut self) {
        eventually("a transaction succeeds", DEADLINE, || {
            self.recover();
            self.write().map_err(|failure| format!("{failure:?}"))
        });
    }

    fn write(&mut self) -> Result<(), TransactionError> {
        self.write_records(1)
    }

    fn write_records(&mut self, count: usize) -> Result<(), TransactionError> {
        let output = output("to".into(), None, None, Some("value".into()));
        let mut offsets = TopicPartitionList::new();
        offsets
            .add_partition_offset("from", 0, Offset::Offset(1))
            .unwrap();
        let consumer = &self.consumer;
        self.transactions.write(
            &vec![output; count],
            &offsets,
            consumer.group_metadata().map(Arc::new).as_ref(),
        )
    }

    fn inject(&self, api: RDKafkaApiKey, error: RDKafkaRespErr, times: usize) {
        self.cluster.request_errors(api, &vec![error; times]);
    }
}

use RDKafkaApiKey as Api;
use RDKafkaRespErr as E;

/// Asserts how a transaction during which a request fails ends, and that a later one succeeds.
fn check(env: &mut MockEnv, api: Api, error: E, expected: Option<RecoveryAction>) {
    env.inject(api, error, 1);
    let found = env.write().err().map(|error| error.action);
    assert_eq!(found, expected, "{error:?} of {}", api as i32);
    // The first attempt may fail, since the client purges its queue while it requests a new epoch.
    env.until_written();
}

#[test]
fn errors_have_their_recovery_actions() {
    use RecoveryAction::{Abort, Fenced, Rebuild};
    let mut env = MockEnv::new();
    env.until_written();
    for (api, error, expected) in [
        // Retried within the transaction.
        (Api::EndTxn, E::RD_KAFKA_RESP_ERR_CONCURRENT_TRANSACTIONS, None),
        (
            Api::EndTxn,
            E::RD_KAFKA_RESP_ERR_COORDINATOR_LOAD_IN_PROGRESS,
            None,
        ),
        (Api::TxnOffsetCommit, E::RD_KAFKA_RESP_ERR_NOT_COORDINATOR, None),
        (
            Api::AddOffsetsToTxn,
            E::RD_KAFKA_RESP_ERR_COORDINATOR_NOT_AVAILABLE,
            None,
        ),
        (
            Api::AddPartitionsToTxn,
            E::RD_KAFKA_RESP_ERR_CONCURRENT_TRANSACTIONS,
            None,
        ),
        (Api::Produce, E::RD_KAFKA_RESP_ERR_NOT_LEADER_FOR_PARTITION, None),
        // An outdated group member.
        (
            Api::TxnOffsetCommit,
            E::RD_KAFKA_RESP_ERR_ILLEGAL_GENERATION,
            Some(Abort),
        ),
        (
            Api::TxnOffsetCommit,
            E::RD_KAFKA_RESP_ERR_UNKNOWN_MEMBER_ID,
            Some(Abort),
        ),
        // Missing permissions.
        (
            Api::AddOffsetsToTxn,
            E::RD_KAFKA_RESP_ERR_GROUP_AUTHORIZATION_FAILED,
            Some(Abort),
        ),
        (
            Api::Produce,
            E::RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED,
            Some(Abort),
        ),
        (
            Api::EndTxn,
            E::RD_KAFKA_RESP_ERR_INVALID_PRODUCER_EPOCH,
            Some(Fenced),
        ),
        (
            Api::AddOffsetsToTxn,
            E::RD_KAFKA_RESP_ERR_INVALID_PRODUCER_EPOCH,
            Some(Fenced),
        ),
        (
            Api::AddPartitionsToTxn,
            E::RD_KAFKA_RESP_ERR_INVALID_PRODUCER_EPOCH,
            Some(Fenced),
        ),
        // Fatal for the producer.
        (Api::EndTxn, E::RD_KAFKA_RESP_ERR_INVALID_TXN_STATE, Some(Rebuild)),
        (
            Api::AddOffsetsToTxn,
            E::RD_KAFKA_RESP_ERR_TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
            Some(Rebuild),
        ),
    ] {
        check(&mut env, api, error, expected);
    }
    env.inject(Api::Produce, E::RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED, 1);
    let error = env.write().unwrap_err();
    assert_eq!(error.refused(), []);
    assert!(error.to_string().contains("delivering to topic `to`"), "{error}");
}

#[test]
fn single_refused_record_is_reported() {
    let errors = [
        (E::RD_KAFKA_RESP_ERR_MSG_SIZE_TOO_LARGE, "output.too-large"),
        (E::RD_KAFKA_RESP_ERR_RECORD_LIST_TOO_LARGE, "output.too-large"),
        (E::RD_KAFKA_RESP_ERR_INVALID_RECORD, "output.refused"),
    ];
    let mut env = MockEnv::new();
    env.until_written();
    for (error, code) in errors {
        env.inject(Api::Produce, error, 1);
        let error = env.write().unwrap_err();
        assert_eq!(error.action, RecoveryAction::Abort, "{error:?}");
        let refused: Vec<_> = error
            .refused()
            .iter()
            .map(|r| (r.index, &*r.failure.code))
            .collect();
        assert_eq!(refused, [(0, code)]);
        assert!(error.refused()[0].failure.message.contains("`to`"), "{error:?}");
        assert!(env.transactions.is_ready(), "{error:?}");
        env.write().unwrap();
    }
}

#[test]
fn refused_batch_is_split() {
    for error in [
        E::RD_KAFKA_RESP_ERR_MSG_SIZE_TOO_LARGE,
        E::RD_KAFKA_RESP_ERR_INVALID_RECORD,
    ] {
        let mut env = MockEnv::new();
        env.recover();
        env.write_records(8).unwrap();
        env.inject(Api::Produce, error, 1);
        env.write_records(8).unwrap();
    }
}

#[test]
fn record_above_client_limit_is_reported() {
    let mut env = MockEnv::new();
    let mut config =
        KafkaSettings::new(env.cluster.bootstrap_servers(), "small").transactional_producer("small");
    config.set("message.max.bytes", "1000");
    env.transactions = Transactions::new(config, "small", Duration::from_secs(5));
    env.recover();
    let output = |size: usize| output("to".into(), None, None, Some(vec![0; size].into()));
    let outputs = [output(2_000), output(10), output(3_000), output(1_990)];
    let mut offsets = TopicPartitionList::new();
    offsets
        .add_partition_offset("from", 0, Offset::Offset(1))
        .unwrap();
    let consumer = &env.consumer;
    let error = env
        .transactions
        .write(
            &outputs,
            &offsets,
            consumer.group_metadata().map(Arc::new).as_ref(),
        )
        .unwrap_err();
    // The last output is smaller than the refused one, so it is unknown whether it fits.
    let refused: Vec<_> = error.refused().iter().map(|refused| refused.index).collect();
    assert_eq!(refused, [0, 2]);
    env.transactions
        .write(
            &outputs[1..2],
            &offsets,
            consumer.group_metadata().map(Arc::new).as_ref(),
        )
        .unwrap();
}

#[test]
fn unknown_outcome_is_resolved() {
    let mut env = MockEnv::with_timeout(Duration::from_secs(3));
    env.recover();
    env.write().unwrap();
    env.cluster.broker_down(1).unwrap();
    let error = env.write().unwrap_err();
    assert!(!env.transactions.is_ready(), "{error:?}");
    env.cluster.broker_up(1).unwrap();
    env.recover();
    env.write().unwrap();
}

#[test]
fn unanswered_request_replaces_producer() {
    let (timed_out, moved) = (
        E::RD_KAFKA_RESP_ERR_REQUEST_TIMED_OUT,
        E::RD_KAFKA_RESP_ERR_NOT_COORDINATOR,
    );
    let unknown = E::RD_KAFKA_RESP_ERR_COORDINATOR_NOT_AVAILABLE;
    let mut env = MockEnv::with_timeout(Duration::from_secs(3));
    env.until_written();
    for injected in [
        // The broker may still carry it out, and with the same epoch it could join the next transaction.
        &[(Api::Produce, timed_out, 1000)][..],
        &[(Api::TxnOffsetCommit, timed_out, 1000)],
        // The coordinator moves, and no broker knows the new one.
        &[
            (Api::TxnOffsetCommit, moved, 1),
            (Api::FindCoordinator, unknown, 1000),
        ],
    ] {
        for (api, error, times) in injected {
            env.inject(*api, *error, *times);
        }
        let error = env.write().unwrap_err();
        assert_eq!(error.action, RecoveryAction::Rebuild, "{error:?}");
        assert_eq!(error.kind, FailureKind::TimedOut, "{error:?}");
        for (api, _, _) in injected {
            env.cluster.clear_request_errors(*api);
        }
        env.until_written();
    }
}

#[test]
fn initialisation_is_retried() {
    let mut env = MockEnv::new();
    env.inject(
        Api::InitProducerId,
        E::RD_KAFKA_RESP_ERR_COORDINATOR_LOAD_IN_PROGRESS,
        3,
    );
    env.recover();
    env.write().unwrap();
}

#[test]
fn unknown_property_is_reported() {
    let mut config = ClientConfig::new();
    config
        .set("bootstrap.servers", "127.0.0.1:1")
        .set("no.such.property", "1");
    let mut transactions = Transactions::new(config.into(), "wrong", Duration::from_secs(1));
    let error = transactions.recover(Duration::from_secs(1)).unwrap_err();
    assert_eq!(error.action, RecoveryAction::Misconfigured);
    assert!(error.into_source().to_string().contains("no.such.property"));
}
