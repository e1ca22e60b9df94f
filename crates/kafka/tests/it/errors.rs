//! Each class of error, injected on librdkafka's mock cluster: what it calls for, and that the next
//! transaction after it succeeds.

use std::time::{Duration, Instant};

use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::mocking::MockCluster;
use rdkafka::producer::DefaultProducerContext;
use rdkafka::topic_partition_list::Offset;
use rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};
use rdkafka::{ClientConfig, TopicPartitionList};
use redeliver_core::{Headers, Output};
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::remedy::RecoveryAction;
use redeliver_kafka::transaction::{TransactionError, Transactions};
use redeliver_testkit::eventually;

struct Bench {
    cluster: MockCluster<'static, DefaultProducerContext>,
    transactions: Transactions,
    consumer: BaseConsumer,
}

impl Bench {
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
        let consumer: BaseConsumer = settings.consumer("group", "member").create().unwrap();
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
                Err(setback) => assert_ne!(setback.remedy, RecoveryAction::Misconfigured, "{setback}"),
            }
        }
        panic!("the producer did not recover");
    }

    fn write(&mut self) -> Result<(), TransactionError> {
        self.write_records(1)
    }

    fn write_records(&mut self, count: usize) -> Result<(), TransactionError> {
        let output = Output {
            topic: "to".into(),
            partition: None,
            key: None,
            value: Some("value".into()),
            headers: Headers::new(),
        };
        let mut offsets = TopicPartitionList::new();
        offsets
            .add_partition_offset("from", 0, Offset::Offset(1))
            .unwrap();
        let consumer = &self.consumer;
        self.transactions
            .write(&vec![output; count], &offsets, || consumer.group_metadata())
    }

    fn inject(&self, api: RDKafkaApiKey, error: RDKafkaRespErr, times: usize) {
        self.cluster.request_errors(api, &vec![error; times]);
    }
}

fn check(api: RDKafkaApiKey, error: RDKafkaRespErr, expected: Option<RecoveryAction>) {
    let mut bench = Bench::new();
    bench.recover();
    bench.write().unwrap();
    bench.inject(api, error, 1);
    let found = bench.write().err().map(|setback| setback.remedy);
    assert_eq!(found, expected, "{error:?} of {}", api as i32);
    // The client may need a second attempt, as it purges its queue while it gets a new epoch.
    eventually("a transaction succeeds", Duration::from_secs(20), || {
        bench.recover();
        bench
            .write()
            .map_err(|setback| format!("{setback:?} after {error:?}"))
    });
}

use RDKafkaApiKey as Api;
use RDKafkaRespErr as E;

#[test]
fn what_passes_by_itself_is_retried_within_the_transaction() {
    check(Api::EndTxn, E::RD_KAFKA_RESP_ERR_CONCURRENT_TRANSACTIONS, None);
    check(
        Api::EndTxn,
        E::RD_KAFKA_RESP_ERR_COORDINATOR_LOAD_IN_PROGRESS,
        None,
    );
    check(Api::TxnOffsetCommit, E::RD_KAFKA_RESP_ERR_NOT_COORDINATOR, None);
    check(
        Api::AddOffsetsToTxn,
        E::RD_KAFKA_RESP_ERR_COORDINATOR_NOT_AVAILABLE,
        None,
    );
    check(
        Api::AddPartitionsToTxn,
        E::RD_KAFKA_RESP_ERR_CONCURRENT_TRANSACTIONS,
        None,
    );
    check(Api::Produce, E::RD_KAFKA_RESP_ERR_NOT_LEADER_FOR_PARTITION, None);
}

#[test]
fn a_stale_member_of_the_group_aborts() {
    check(
        Api::TxnOffsetCommit,
        E::RD_KAFKA_RESP_ERR_ILLEGAL_GENERATION,
        Some(RecoveryAction::Abort),
    );
    check(
        Api::TxnOffsetCommit,
        E::RD_KAFKA_RESP_ERR_UNKNOWN_MEMBER_ID,
        Some(RecoveryAction::Abort),
    );
    check(
        Api::AddOffsetsToTxn,
        E::RD_KAFKA_RESP_ERR_GROUP_AUTHORIZATION_FAILED,
        Some(RecoveryAction::Abort),
    );
}

#[test]
fn what_may_not_be_written_aborts() {
    check(
        Api::Produce,
        E::RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED,
        Some(RecoveryAction::Abort),
    );
    let mut bench = Bench::new();
    bench.recover();
    bench.inject(Api::Produce, E::RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED, 1);
    let setback = bench.write().unwrap_err();
    assert_eq!(setback.refused, []);
    assert!(
        setback.to_string().contains("delivering to topic `to`"),
        "{setback}"
    );
}

#[test]
fn a_record_that_is_refused_alone_is_named() {
    let errors = [
        (E::RD_KAFKA_RESP_ERR_MSG_SIZE_TOO_LARGE, "output.too-large"),
        (E::RD_KAFKA_RESP_ERR_RECORD_LIST_TOO_LARGE, "output.too-large"),
        (E::RD_KAFKA_RESP_ERR_INVALID_RECORD, "output.refused"),
    ];
    for (error, code) in errors {
        check(Api::Produce, error, Some(RecoveryAction::Abort));
        let mut bench = Bench::new();
        bench.recover();
        bench.write().unwrap();
        bench.inject(Api::Produce, error, 1);
        let setback = bench.write().unwrap_err();
        let refused: Vec<_> = setback
            .refused
            .iter()
            .map(|r| (r.index, &*r.failure.code))
            .collect();
        assert_eq!(refused, [(0, code)]);
        assert!(setback.refused[0].failure.message.contains("`to`"), "{setback:?}");
        assert!(bench.transactions.is_ready(), "{setback:?}");
        bench.write().unwrap();
    }
}

#[test]
fn a_batch_that_is_refused_is_written_again_in_smaller_ones() {
    for error in [
        E::RD_KAFKA_RESP_ERR_MSG_SIZE_TOO_LARGE,
        E::RD_KAFKA_RESP_ERR_INVALID_RECORD,
    ] {
        let mut bench = Bench::new();
        bench.recover();
        bench.write_records(8).unwrap();
        bench.inject(Api::Produce, error, 1);
        bench.write_records(8).unwrap();
    }
}

#[test]
fn a_record_that_is_larger_than_the_client_allows_is_named_without_asking_the_broker() {
    let mut bench = Bench::new();
    let mut config =
        KafkaSettings::new(bench.cluster.bootstrap_servers(), "small").transactional_producer("small");
    config.set("message.max.bytes", "1000");
    bench.transactions = Transactions::new(config, "small", Duration::from_secs(5));
    bench.recover();
    let output = |size: usize| Output {
        topic: "to".into(),
        partition: None,
        key: None,
        value: Some(vec![0; size].into()),
        headers: Headers::new(),
    };
    let outputs = [output(2_000), output(10), output(3_000), output(1_990)];
    let mut offsets = TopicPartitionList::new();
    offsets
        .add_partition_offset("from", 0, Offset::Offset(1))
        .unwrap();
    let consumer = &bench.consumer;
    let setback = bench
        .transactions
        .write(&outputs, &offsets, || consumer.group_metadata())
        .unwrap_err();
    // The last one is smaller than the one that was refused, so it is still to be found out.
    let refused: Vec<_> = setback.refused.iter().map(|refused| refused.index).collect();
    assert_eq!(refused, [0, 2]);
    bench
        .transactions
        .write(&outputs[1..2], &offsets, || consumer.group_metadata())
        .unwrap();
}

#[test]
fn a_producer_whose_epoch_is_over_is_replaced() {
    check(
        Api::EndTxn,
        E::RD_KAFKA_RESP_ERR_INVALID_PRODUCER_EPOCH,
        Some(RecoveryAction::Fenced),
    );
    check(
        Api::AddOffsetsToTxn,
        E::RD_KAFKA_RESP_ERR_INVALID_PRODUCER_EPOCH,
        Some(RecoveryAction::Fenced),
    );
    check(
        Api::AddPartitionsToTxn,
        E::RD_KAFKA_RESP_ERR_INVALID_PRODUCER_EPOCH,
        Some(RecoveryAction::Fenced),
    );
}

#[test]
fn a_fatal_error_replaces_the_producer() {
    check(
        Api::EndTxn,
        E::RD_KAFKA_RESP_ERR_INVALID_TXN_STATE,
        Some(RecoveryAction::Rebuild),
    );
    check(
        Api::AddOffsetsToTxn,
        E::RD_KAFKA_RESP_ERR_TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        Some(RecoveryAction::Rebuild),
    );
}

#[test]
fn a_transaction_of_unknown_outcome_is_resolved_by_a_new_producer() {
    let mut bench = Bench::with_timeout(Duration::from_secs(1));
    bench.recover();
    bench.write().unwrap();
    bench.cluster.broker_down(1).unwrap();
    let setback = bench.write().unwrap_err();
    assert!(!bench.transactions.is_ready(), "{setback:?}");
    bench.cluster.broker_up(1).unwrap();
    bench.recover();
    bench.write().unwrap();
}

#[test]
fn a_group_coordinator_that_nobody_knows_holds_a_transaction_up_for_its_time_only() {
    let mut bench = Bench::with_timeout(Duration::from_secs(1));
    bench.recover();
    bench.write().unwrap();
    // The coordinator moves, and for a while no broker knows whereto.
    bench.inject(Api::TxnOffsetCommit, E::RD_KAFKA_RESP_ERR_NOT_COORDINATOR, 1);
    bench.inject(
        Api::FindCoordinator,
        E::RD_KAFKA_RESP_ERR_COORDINATOR_NOT_AVAILABLE,
        1000,
    );
    let began = Instant::now();
    let setback = bench.write().unwrap_err();
    assert!(began.elapsed() < Duration::from_secs(10), "{setback}");
    assert_eq!(setback.remedy, RecoveryAction::Rebuild, "{setback}");
    bench.cluster.clear_request_errors(Api::FindCoordinator);
    bench.recover();
    bench.write().unwrap();
}

#[test]
fn a_broker_that_is_not_ready_is_waited_for() {
    let mut bench = Bench::new();
    bench.inject(
        Api::InitProducerId,
        E::RD_KAFKA_RESP_ERR_COORDINATOR_LOAD_IN_PROGRESS,
        3,
    );
    bench.recover();
    bench.write().unwrap();
}

#[test]
fn a_configuration_that_cannot_work_is_named_at_once() {
    let mut config = ClientConfig::new();
    config
        .set("bootstrap.servers", "127.0.0.1:1")
        .set("no.such.property", "1");
    let mut transactions = Transactions::new(config, "wrong", Duration::from_secs(1));
    let setback = transactions.recover(Duration::from_secs(1)).unwrap_err();
    assert_eq!(setback.remedy, RecoveryAction::Misconfigured);
    assert!(setback.into_source().to_string().contains("no.such.property"));
}
