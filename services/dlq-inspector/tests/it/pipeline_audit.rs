//! Audits of pipelines that go on: what overviews show of records that are accounted for, and of a planted duplicate and a loss.

use std::sync::Arc;

use redeliver_core::Pipeline;
use redeliver_kafka::groups::{self, CommittedOffset, GroupOffsets};
use redeliver_proto::v1;
use redeliver_proto::v1::overview_service_client::OverviewServiceClient;
use redeliver_proto::v1::{PipelineAuditState as State, ProblemKind};
use redeliver_testkit::{ensure, eventually_async};

use crate::access::Callers;
use crate::support::{DEADLINE, Dead, Inspector, dead};

/// A pipeline whose worker is the test.
struct Plant {
    callers: Callers,
    pipeline: String,
    next: i64,
}

impl Plant {
    fn topic(&self, suffix: &str) -> Arc<str> {
        format!("{}{suffix}", self.pipeline).into()
    }

    fn result(&self, offset: i64) -> Dead {
        let offset = offset.to_string();
        let headers = [
            ("pipeline", &*self.pipeline),
            ("original-topic", &self.pipeline),
            ("original-partition", "0"),
            ("original-offset", &offset),
            ("retry-count", "0"),
        ];
        dead("k", "v", &headers)
    }

    /// Processes new records, of which the first ones have results.
    async fn process(&mut self, records: i64, results: i64) {
        let new = (0..records).map(|_| dead("k", "v", &[])).collect();
        self.callers.env.put(&self.topic(""), 0, new).await;
        let done = (self.next..self.next + results).map(|offset| self.result(offset));
        self.callers
            .env
            .put(&self.topic("-done"), 0, done.collect())
            .await;
        self.next += records;
        let committed = CommittedOffset::new(self.next, "");
        let offsets = GroupOffsets::from([((self.pipeline.clone(), 0), committed)]);
        let group = Pipeline::new(&self.pipeline).worker_group("");
        groups::commit(&self.callers.env.kafka, &group, &offsets).unwrap();
    }

    /// Waits until the audit has found this.
    async fn until(
        &self,
        inspector: &mut Inspector,
        holds: impl Fn(&v1::PipelineAudit) -> bool,
    ) -> v1::Overview {
        let channel = inspector.channel().await;
        let mut client = OverviewServiceClient::with_interceptor(channel, self.callers.interceptor("all"));
        let selection = v1::OverviewSelection {
            pipeline: self.pipeline.clone(),
            ..v1::OverviewSelection::default()
        };
        eventually_async("a result of the audit", DEADLINE, async || {
            let request = v1::GetOverviewRequest {
                selection: Some(selection.clone()),
            };
            let overview = client.get_overview(request).await.unwrap().into_inner();
            let audit = overview.pipelines[0].audit.clone().unwrap();
            ensure(holds(&audit), format!("{audit:?}")).map(|()| overview)
        })
        .await
    }
}

fn is_clean(audit: &v1::PipelineAudit, source: u64) -> bool {
    audit.state() == State::Clean && (audit.source, audit.output) == (source, source)
}

fn has(audit: &v1::PipelineAudit, kinds: &[(&str, u64)]) -> bool {
    let defects = audit.defects.iter();
    let defects: Vec<_> = defects.map(|defect| (&*defect.kind, defect.count)).collect();
    audit.state() == State::NotClean && defects == kinds
}

#[tokio::test(flavor = "multi_thread")]
async fn audit_finds_planted_defects() {
    let callers = Callers::without_dead_letters("pipeline-audit", &[("all", &["*"])]).await;
    let pipeline = callers.topics[0].strip_suffix("-dlq").unwrap().to_owned();
    let mut plant = Plant {
        callers,
        pipeline,
        next: 0,
    };
    for (key, value) in [
        ("retry", "{ tiers: [2h] }"),
        ("output", &*plant.topic("-done")),
        // The test is the worker.
        ("http", "{ url: 'http://127.0.0.1:9/' }"),
    ] {
        let key = format!("pipelines.{}.{key}", plant.pipeline);
        plant.callers.env.base.set(&key, value);
    }
    for (key, value) in [("enabled", "true"), ("interval", "1s")] {
        let key = format!("dlq_inspector.pipeline_audit.{key}");
        plant.callers.env.base.set(&key, value);
    }
    for suffix in ["", "-retry-2h", "-retry-due", "-done"] {
        plant.callers.env.recreate_topic(&plant.topic(suffix), 1).await;
    }
    plant.process(2, 2).await;
    let mut inspector = plant.callers.env.start().await;
    plant.until(&mut inspector, |audit| is_clean(audit, 0)).await;
    // Results and committed offsets are not in one transaction here: meanwhile, they do not fit together.
    plant.process(12, 12).await;
    let overview = plant.until(&mut inspector, |audit| is_clean(audit, 12)).await;
    assert!(
        overview
            .problems
            .iter()
            .all(|problem| problem.kind() != ProblemKind::NotClean)
    );

    let second = plant.result(3);
    plant
        .callers
        .env
        .put(&plant.topic("-done"), 0, vec![second])
        .await;
    let overview = plant
        .until(&mut inspector, |audit| has(audit, &[("doubled", 1)]))
        .await;
    let problem = &overview.problems[0];
    assert_eq!((problem.kind(), problem.count), (ProblemKind::NotClean, Some(1)));
    let first = &overview.pipelines[0].audit.as_ref().unwrap().defects[0].first[0];
    assert!(
        first.starts_with(&format!("{}/0/3 at ", plant.pipeline)),
        "{first}"
    );
    let series = format!(
        "redeliver_dlq_pipeline_audit_defects{{pipeline=\"{}\"}}",
        plant.pipeline
    );
    assert_eq!(inspector.process.metric(&series), 1);

    plant.process(2, 1).await;
    let both = [("lost", 1), ("doubled", 1)];
    plant.until(&mut inspector, |audit| has(audit, &both)).await;

    // It keeps nothing, and checks what comes in from now on.
    drop(inspector);
    let mut inspector = plant.callers.env.start().await;
    plant.until(&mut inspector, |audit| is_clean(audit, 0)).await;
    plant.process(3, 3).await;
    plant.until(&mut inspector, |audit| is_clean(audit, 3)).await;
}
