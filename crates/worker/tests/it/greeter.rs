//! The example and the program of the guide, as a process.

use redeliver_core::headers::{ERROR_CODE, RETRY_COUNT};
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::producer::Producer;
use redeliver_testkit::{EnvBuilder, ensure, eventually, unique_delays};
use tokio::runtime::Runtime;

use crate::handler::{DEADLINE, by_value, output, text};

#[test]
fn greeter_answers_as_documented() {
    let tier = unique_delays(&[300])[0];
    let env = EnvBuilder::new("greeter")
        .creates_topics()
        .yaml(&format!(
            "pipelines: {{ {{name}}: {{ output: {{name}}-out, retry: {{ tiers: [{tier}ms] }} }} }}\n"
        ))
        .build();
    let mut greeter = env.start("examples/greeter", "a", &[]);
    let _tier = env.start("retry-tier", "a", &[]);
    let kafka = KafkaSettings::new(env.brokers().to_owned(), "greeter-test");
    let producer = Producer::new(&kafka).unwrap();
    let name = env.name();
    Runtime::new().unwrap().block_on(async {
        for value in ["ada", "shy", ""] {
            let record = output(&name.into(), value);
            producer.send(&record).await.unwrap();
        }
    });
    let (greeted, dead) = eventually("all names have ended", DEADLINE, || {
        let [greeted, dead] = ["out", "dlq"].map(|of| by_value(&kafka, &format!("{name}-{of}").into()));
        let ended = greeted.len() + dead.len();
        ensure(ended == 3, ended).map(|()| (greeted, dead))
    });
    for (value, retries) in [("hello ada", "0"), ("hello shy", "1")] {
        let found = text(&greeted[value], RETRY_COUNT);
        assert_eq!(found.as_deref(), Some(retries), "{value}");
    }
    let code = text(&dead[""], ERROR_CODE);
    assert_eq!(code.as_deref(), Some("greeter.no-name"));
    greeter.shut_down();
}
