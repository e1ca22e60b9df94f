//! Builds the lanes of tiers, including leftover ones.

use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;

use redeliver_core::{Clock, HumanDuration, pipeline};
use redeliver_kafka::{KafkaSettings, Prefetch, TopicState, TopicWatch, Waker};
use redeliver_runtime::Config;
use redeliver_service::audit::AuditLog;
use redeliver_service::control::Control;
use redeliver_service::host::{Host, NewLane, lane_spec};
use redeliver_service::metrics::Serves;
use redeliver_service::waiting_actions::Actions;

use crate::config::RetryTierConfig;
use crate::lookups::{Lookups, Question};
use crate::metrics::TierFamilies;
use crate::relay::{ActionContext, LookAhead, Relay, RelayContext, ServedPipeline};

/// What the lanes of all tiers share.
pub(crate) struct TierLanes {
    config: Arc<Config>,
    kafka: KafkaSettings,
    look_ahead: LookAhead,
    clock: Arc<dyn Clock>,
    families: TierFamilies,
    topic_watch: TopicWatch,
    control: Control,
    actions: Actions,
    lookups: SyncSender<(Question, Waker)>,
}

impl TierLanes {
    /// # Errors
    /// See [`Host::topic_watch`].
    pub(crate) fn new(
        host: &mut Host,
        settings: &RetryTierConfig,
        control: Control,
        actions: Actions,
    ) -> io::Result<Self> {
        let config = host.config.clone();
        let (answering, lookups) = Lookups::new(host.kafka.clone(), host.tasks.shutdown().clone());
        host.tasks.spawn_thread("waiting-lookups", move || {
            answering.run();
            Ok::<(), Infallible>(())
        })?;
        let families = TierFamilies::register(&mut host.registry(), host.clock.clone());
        Ok(Self {
            look_ahead: LookAhead {
                records: settings.look_ahead as usize,
                bytes: usize::try_from(settings.look_ahead_bytes).unwrap_or(usize::MAX),
            },
            kafka: KafkaSettings {
                prefetch: Prefetch::WAITING,
                ..host.kafka.clone()
            },
            clock: host.clock.clone(),
            families,
            topic_watch: host.topic_watch()?,
            control,
            actions,
            lookups,
            config,
        })
    }

    /// A lane of a tier's topics of these pipelines, in the consumer group of the tier.
    pub(crate) fn lane(
        &self,
        name: String,
        tier: HumanDuration,
        pipelines: &[ServedPipeline],
    ) -> NewLane<Relay> {
        let presence = Box::new({
            let watch = self.topic_watch.clone();
            move |topic: &str| watch.presence(topic)
        });
        let waker = Waker::new();
        let ask = Box::new({
            let (lookups, waker) = (self.lookups.clone(), waker.clone());
            move |question| lookups.try_send((question, waker.clone())).is_ok()
        });
        let group = pipeline::retry_tier_group(&self.kafka.id_prefix, tier);
        let serves = Serves {
            tier: Some(tier),
            pipelines: pipelines
                .iter()
                .map(|served| (served.topic(tier), served.name()))
                .collect(),
        };
        let relay = Relay::new(
            tier,
            pipelines,
            self.look_ahead,
            |topic| self.families.of(&name, serves.labels_of(topic, &group)),
            RelayContext {
                clock: self.clock.clone(),
                control: self.control.clone(),
                presence,
                partitions: Box::new({
                    let watch = self.topic_watch.clone();
                    move |topic| match watch.state(topic) {
                        TopicState::Exists { partitions, .. } => u32::try_from(partitions).ok(),
                        TopicState::Unknown | TopicState::Missing { .. } => None,
                    }
                }),
                acting: ActionContext {
                    actions: self.actions.clone(),
                    topic: self.config.waiting_actions_topic().into(),
                    audit: AuditLog::new(&self.config, "retry-tier"),
                    id_of: Box::new({
                        let watch = self.topic_watch.clone();
                        move |topic| match watch.state(topic) {
                            TopicState::Exists { id, .. } => id,
                            TopicState::Unknown | TopicState::Missing { .. } => None,
                        }
                    }),
                    ask,
                },
            },
        );
        self.control.wake(&waker);
        self.actions.wake(&waker);
        // The lane is woken when one of these topics becomes available or unavailable.
        self.topic_watch.watch(relay.written_topics(), &waker);
        NewLane {
            kafka: self.kafka.clone(),
            spec: lane_spec(&self.config, name, group, relay.topics()),
            serves,
            waker,
            processor: relay,
        }
    }
}
