//! Measurements of Redeliver on a real broker, beside baselines in the same run.

mod bare;
mod kafka;
mod lane;

use std::time::Duration;

use redeliver_core::headers::{self, Origin};
use redeliver_core::{Headers, Output, Timestamp};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let broker = kafka::Broker::new(std::env::var("KAFKA_BROKERS")?);
    let n = 1_000_000;
    let from = broker.name("from");
    broker.create(&[&from], 4).await?;
    broker.fill(n, |i| waiting(&from, "due", i, Timestamp::from_millis(0)))?;
    for round in 0..3 {
        let to = broker.name(&format!("bare-{round}"));
        broker.create(&[&to], 4).await?;
        let took = bare::copy(
            &broker.address,
            &broker.name(&format!("bare-group-{round}")),
            &from,
            &to,
            n,
            5000,
        )?;
        println!("bare {:.0}/s", n as f64 / took.as_secs_f64());
        broker.delete(&[&to]).await?;
        let to = broker.name(&format!("lane-{round}"));
        broker.create(&[&to], 4).await?;
        let watch = broker.watch(&to, 4)?;
        let (stop, thread) = lane::start(
            broker.settings("lane"),
            &broker.name(&format!("lane-group-{round}")),
            &from,
            &to,
        );
        let took = watch.time_until(n as i64, Duration::from_secs(60))?;
        println!("lane {:.0}/s", n as f64 / took.as_secs_f64());
        stop.cancel();
        thread.join().unwrap();
        broker.delete(&[&to]).await?;
    }
    broker.delete(&[&from]).await?;
    Ok(())
}

/// A record of 200 bytes as a worker puts it into a tier.
fn waiting(topic: &str, return_topic: &str, index: usize, due: Timestamp) -> Output {
    let mut list = Headers::new();
    let origin = Origin {
        topic: "source".into(),
        partition: 0,
        offset: index as i64,
        timestamp: Some(due),
    };
    headers::write_lineage(&mut list, "pipeline", &origin, 1);
    headers::write_failure(
        &mut list,
        &redeliver_core::Failure::transient("http.503", "busy"),
        due,
    );
    list.push_text(headers::PROCESS_AFTER, &due.to_string());
    list.push_text(headers::RETURN_TOPIC, return_topic);
    Output {
        topic: topic.into(),
        key: Some(format!("key-{index}").into()),
        value: Some(vec![b'x'; 200].into()),
        headers: list,
    }
}
