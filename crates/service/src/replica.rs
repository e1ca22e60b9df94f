//! Replicas of small topics in the process.

use std::convert::Infallible;
use std::io;

use redeliver_runtime::health::{Health, Part};
use redeliver_store::{Follower, Replica, State, Topic};

use crate::host::Host;

impl Host {
    /// Follows a topic until the process shuts down. The process is not ready before the topic was read to its end, or is known not
    /// to exist if it is [optional](State::IS_OPTIONAL).
    ///
    /// # Errors
    /// When a thread or the watch of the topics cannot be started.
    pub fn follow<S: State>(&mut self, topic: &str) -> io::Result<Replica<S>> {
        self.follow_and_write(topic, &[])
    }

    /// The same in a process that writes these topics, too, for what the topic wants. While it cannot, it is ready, and names them.
    ///
    /// # Errors
    /// See [`Host::follow`].
    pub fn follow_and_write<S: State>(&mut self, topic: &str, written: &[String]) -> io::Result<Replica<S>> {
        let part = self.health.part(S::NAME);
        self.follow_in(topic, written, part, S::IS_OPTIONAL)
    }

    /// The same in a process that is ready without the topic.
    ///
    /// # Errors
    /// See [`Host::follow`].
    pub fn follow_aside<S: State>(&mut self, topic: &str) -> io::Result<Replica<S>> {
        self.follow_in(topic, &[], Health::new().part(S::NAME), true)
    }

    fn follow_in<S: State>(
        &mut self,
        topic: &str,
        written: &[String],
        part: Part,
        may_be_missing: bool,
    ) -> io::Result<Replica<S>> {
        let topic = Topic {
            kafka: self.kafka.clone(),
            name: topic.into(),
            written: written.iter().map(|topic| topic.as_str().into()).collect(),
            may_be_missing,
            watch: self.topic_watch()?,
            part,
            stop: self.tasks.shutdown().clone(),
        };
        let (follower, replica) = Follower::new(topic, &mut self.registry());
        self.tasks.spawn_thread(S::NAME, move || {
            follower.run();
            Ok::<(), Infallible>(())
        })?;
        Ok(replica)
    }
}
