//! Places and pays orders. An order and the job that reminds of its payment are written in one Kafka transaction, and so are
//! a payment and the cancellation of that job.
//!
//! ```text
//! redeliver-example-transactional BROKERS INGEST APP ORDERS NAME place ORDER SECONDS [commit|abort|wait]
//! redeliver-example-transactional BROKERS INGEST APP ORDERS NAME pay ORDER JOB [commit|abort|wait]
//! ```
//!
//! INGEST is the ingest topic of the scheduler, APP its application for reminders, and ORDERS a topic for orders and payments.
//! NAME is the transactional id: each process that runs at the same time needs its own, and keeps it when it is started again.
//! `abort` ends the transaction with nothing written, and `wait` leaves it open until the process is killed.

use std::fmt::Display;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use rdkafka::ClientConfig;
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::future_producer::Delivery;
use rdkafka::producer::{FutureProducer, FutureRecord, Producer as _};
use rdkafka::util::Timeout;
use redeliver_client::{IngestTopic, JobId, JobRequest, Output, Timestamp};
use serde_json::json;

struct Orders {
    producer: FutureProducer,
    ingest: IngestTopic,
    app: String,
    orders: String,
}

impl Orders {
    /// Writes an order and schedules its reminder. Returns the id of the job.
    async fn place(&self, order: &str, delay: Duration) -> Result<JobId> {
        let reminder = JobRequest::after(&self.app, delay)
            .idempotency_key(order)
            .key(order.to_owned())
            .data(json!({ "order": order }).to_string());
        let reminder = job_id(&self.command(&self.ingest.schedule(&reminder)?).await?)?;
        let placed = json!({ "event": "placed", "order": order, "reminder": reminder.to_string() });
        self.event(order, &placed).await?;
        Ok(reminder)
    }

    /// Writes a payment and cancels the reminder, whose id is in the record of the order.
    async fn pay(&self, order: &str, reminder: JobId) -> Result<JobId> {
        self.command(&self.ingest.cancel(reminder)?).await?;
        self.event(order, &json!({ "event": "paid", "order": order }))
            .await?;
        Ok(reminder)
    }

    /// Writes a command as a part of the open transaction, and waits until Kafka has confirmed it.
    async fn command(&self, command: &Output) -> Result<Delivery> {
        let headers = command.headers.iter();
        let headers = headers.fold(OwnedHeaders::new(), |headers, (key, value)| {
            headers.insert(Header { key, value })
        });
        let mut record = FutureRecord::<[u8], [u8]>::to(&command.topic).headers(headers);
        record.partition = command.partition;
        record.key = command.key.as_deref();
        record.payload = command.value.as_deref();
        let written = self.producer.send(record, Timeout::Never).await;
        written.map_err(|(error, _)| error).context("writing a command")
    }

    async fn event(&self, order: &str, content: &impl Display) -> Result<()> {
        let content = content.to_string();
        let record = FutureRecord::to(&self.orders).key(order).payload(&content);
        let written = self.producer.send(record, Timeout::Never).await;
        written.map_err(|(error, _)| error).context("writing an event")?;
        Ok(())
    }
}

fn job_id(request: &Delivery) -> Result<JobId> {
    // Otherwise a retry found that the request was written before.
    ensure!(request.offset >= 0, "the offset of the request is unknown");
    let timestamp = request
        .timestamp
        .to_millis()
        .context("Kafka returned no timestamp")?;
    let timestamp = Timestamp::from_millis(timestamp);
    Ok(JobId::new(timestamp, request.partition, request.offset))
}

fn connect(brokers: &str, name: &str) -> Result<FutureProducer> {
    let producer: FutureProducer = ClientConfig::new()
        .set("bootstrap.servers", brokers)
        .set("transactional.id", name)
        // While a transaction is open, later commands in the same partition wait. If the producer dies, its transaction is aborted after this time.
        .set("transaction.timeout.ms", "5000")
        .set("partitioner", "murmur2_random")
        .create()?;
    // Ends a transaction that a previous process with this name has left open.
    producer.init_transactions(Timeout::Never)?;
    Ok(producer)
}

fn ingest_topic(producer: &FutureProducer, topic: &str) -> Result<IngestTopic> {
    let metadata = producer
        .client()
        .fetch_metadata(Some(topic), Duration::from_secs(10))?;
    let partitions = metadata
        .topics()
        .first()
        .map_or(0, |topic| topic.partitions().len());
    Ok(IngestTopic::new(topic, i32::try_from(partitions)?)?)
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let [
        brokers,
        ingest,
        app,
        orders,
        name,
        verb,
        order,
        argument,
        end @ ..,
    ] = &arguments[..]
    else {
        bail!("expected: BROKERS INGEST APP ORDERS NAME place|pay ORDER SECONDS|JOB [commit|abort|wait]");
    };
    let producer = connect(brokers, name)?;
    let orders = Orders {
        ingest: ingest_topic(&producer, ingest)?,
        producer: producer.clone(),
        app: (*app).to_owned(),
        orders: (*orders).to_owned(),
    };
    producer.begin_transaction()?;
    let written = match *verb {
        "place" => orders.place(order, Duration::from_secs(argument.parse()?)).await,
        _ => orders.pay(order, argument.parse()?).await,
    };
    match (written, end) {
        (Ok(job), ["wait"]) => {
            println!("open {order} {job}");
            std::future::pending::<()>().await;
        }
        (Ok(job), ["abort"]) => {
            producer.abort_transaction(Timeout::Never)?;
            println!("aborted {order} {job}");
        }
        (Ok(job), _) => {
            producer.commit_transaction(Timeout::Never)?;
            println!("committed {order} {job}");
        }
        (Err(error), _) => {
            producer.abort_transaction(Timeout::Never)?;
            return Err(error);
        }
    }
    Ok(())
}
