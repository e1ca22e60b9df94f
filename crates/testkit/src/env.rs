//! The environment of a test: unique names, a configuration file, and the processes that run with it.
//!
//! ```text
//! let env = EnvBuilder::new("orders").scheduler(&[("mail", "{name}-mail")]).build();
//! let mut scheduler = env.start("scheduler", "a", &[]);
//! assert_eq!(scheduler.get("/livez").0, 200);
//! let listed = env.run("redeliver", &["dlq", "ls"]);
//! ```

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::kafka_request::delete_topics_with;
use crate::process::{CommandOutput, binary, run};
use crate::scratch::Scratch;
use crate::{ServiceProcess, brokers, redis_url, unique};

/// Describes a [`TestEnv`]. In all texts and settings, `{name}` stands for the environment's name and `{dir}` for its
/// directory.
#[derive(Clone, Debug)]
pub struct EnvBuilder {
    name: String,
    brokers: Option<String>,
    redis_url: Option<String>,
    partitions: u32,
    creates_topics: bool,
    apps: Option<Vec<(String, String)>>,
    yaml: String,
    settings: BTreeMap<String, String>,
}

impl EnvBuilder {
    /// An environment with a unique name that starts with `name`, on the shared Kafka and Redis, with two partitions
    /// per topic.
    pub fn new(name: &str) -> Self {
        Self {
            name: unique(name),
            brokers: None,
            redis_url: None,
            partitions: 2,
            creates_topics: false,
            apps: None,
            yaml: String::new(),
            settings: BTreeMap::new(),
        }
    }

    /// The unique name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Uses another Kafka.
    #[must_use]
    pub fn brokers(mut self, brokers: impl Into<String>) -> Self {
        self.brokers = Some(brokers.into());
        self
    }

    /// Uses another Redis.
    #[must_use]
    pub fn redis(mut self, url: impl Into<String>) -> Self {
        self.redis_url = Some(url.into());
        self
    }

    /// The number of partitions of each topic.
    #[must_use]
    pub fn partitions(mut self, count: u32) -> Self {
        self.partitions = count;
        self
    }

    /// Services create missing topics.
    #[must_use]
    pub fn creates_topics(mut self) -> Self {
        self.creates_topics = true;
        self
    }

    /// Configures a scheduler that no other test uses, with these applications and their topics. Its topics are
    /// `{name}-jobs-ingest`, `-state`, `-dlq` and `-answers`, `{name}-control` and `{name}-audit`, its group is `{name}-scheduler`, and its keys in Redis
    /// start with `{name}`.
    #[must_use]
    pub fn scheduler(mut self, apps: &[(&str, &str)]) -> Self {
        let owned = |(app, topic): &(&str, &str)| ((*app).to_owned(), (*topic).to_owned());
        self.apps = Some(apps.iter().map(owned).collect());
        self
    }

    /// Appends to the configuration file.
    #[must_use]
    pub fn yaml(mut self, text: &str) -> Self {
        self.yaml.push_str(text);
        self
    }

    /// A setting, which overrides the file.
    #[must_use]
    pub fn set(mut self, key: &str, value: &str) -> Self {
        self.settings.insert(key.to_owned(), value.to_owned());
        self
    }

    /// Writes the configuration file.
    ///
    /// # Panics
    /// If the file cannot be written, or there is no shared Kafka or Redis where the test needs it.
    #[track_caller]
    pub fn build(self) -> TestEnv {
        let scratch = Scratch::new("env").expect("making a directory");
        let is_shared = self.brokers.is_none();
        let brokers = self.brokers.unwrap_or_else(brokers);
        let mut text = format!(
            "kafka: {{ brokers: '{brokers}', topics: {{ create: {}, partitions: {} }} }}\n\
             admin: {{ listen: '127.0.0.1:0' }}\n",
            self.creates_topics, self.partitions
        );
        if let Some(apps) = self.apps {
            let redis = self.redis_url.unwrap_or_else(redis_url);
            let apps: Vec<String> = apps
                .iter()
                .map(|(app, topic)| format!("{app}: {{ topic: '{topic}' }}"))
                .collect();
            let topics =
                ["ingest", "state", "dlq", "answers"].map(|of| format!("{of}: '{{name}}-jobs-{of}'"));
            write!(
                text,
                "redis: {{ url: '{redis}', prefix: '{{name}}' }}\nscheduler:\n  listen: '127.0.0.1:0'\n  \
                 group: '{{name}}-scheduler'\n  apps: {{ {} }}\n  topics: {{ {} }}\n\
                 control: {{ topic: '{{name}}-control' }}\naudit: {{ topic: '{{name}}-audit' }}\n",
                apps.join(", "),
                topics.join(", ")
            )
            .expect("a string takes everything");
        }
        text.push_str(&self.yaml);
        let directory = scratch.path().display().to_string();
        let fill_in = |text: String| text.replace("{name}", &self.name).replace("{dir}", &directory);
        let file = scratch.path().join("redeliver.yaml");
        std::fs::write(&file, fill_in(text)).expect("writing the configuration file");
        let settings = self.settings.into_iter();
        TestEnv {
            settings: settings.map(|(key, value)| (key, fill_in(value))).collect(),
            partitions: self.partitions,
            file,
            remains: Arc::new(Remains {
                scratch,
                topics: is_shared.then(|| (brokers.clone(), self.name.clone())),
            }),
            brokers,
            name: self.name,
        }
    }
}

/// A configuration that belongs to one test, and the processes that run with it. See the module.
#[derive(Clone, Debug)]
pub struct TestEnv {
    name: String,
    brokers: String,
    partitions: u32,
    file: PathBuf,
    settings: BTreeMap<String, String>,
    // Processes share them, so that they can be started again for as long as they exist.
    remains: Arc<Remains>,
}

/// What is removed after the last process.
#[derive(Debug)]
struct Remains {
    scratch: Scratch,
    /// The shared brokers, and a part of the names of all topics of the test. Each topic that stays makes each later test slower.
    topics: Option<(String, String)>,
}

impl Drop for Remains {
    fn drop(&mut self) {
        if let Some((brokers, name)) = &self.topics
            && let Err(error) = delete_topics_with(brokers, name)
        {
            eprintln!("deleting the topics of {name}: {error:#}");
        }
    }
}

impl TestEnv {
    /// The unique name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The brokers of the configuration file.
    pub fn brokers(&self) -> &str {
        &self.brokers
    }

    /// The number of partitions of each topic.
    pub fn partitions(&self) -> u32 {
        self.partitions
    }

    /// A directory that is removed with the environment.
    pub fn directory(&self) -> &Path {
        self.remains.scratch.path()
    }

    /// The configuration file.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// The text of the configuration file.
    ///
    /// # Panics
    /// If the file cannot be read.
    #[track_caller]
    pub fn yaml(&self) -> String {
        std::fs::read_to_string(&self.file).expect("reading the configuration file")
    }

    /// The settings that override the file.
    pub fn settings(&self) -> &BTreeMap<String, String> {
        &self.settings
    }

    /// Changes a setting for processes that are started from now on.
    pub fn set(&mut self, key: &str, value: &str) {
        self.settings.insert(key.to_owned(), value.to_owned());
    }

    /// The same environment with another configuration file.
    ///
    /// # Panics
    /// If the file cannot be written.
    #[must_use]
    pub fn with_yaml(&self, text: &str) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let file = self.directory().join(format!("changed-{number}.yaml"));
        std::fs::write(&file, text).expect("writing the configuration file");
        Self { file, ..self.clone() }
    }

    /// A command of one of our binaries with this configuration.
    #[track_caller]
    pub fn command(&self, program: &str, arguments: &[&str]) -> Command {
        let mut command = binary(program);
        command
            .env_clear()
            .args(arguments)
            .arg("--config")
            .arg(&self.file);
        for (key, value) in &self.settings {
            command.arg("--set").arg(format!("{key}={value}"));
        }
        command
    }

    /// Runs one of our binaries to its end.
    #[track_caller]
    pub fn run(&self, program: &str, arguments: &[&str]) -> CommandOutput {
        run(self.command(program, arguments))
    }

    /// Starts a service. Its instance is the environment's name followed by `instance`.
    #[track_caller]
    pub fn spawn(&self, service: &str, instance: &str, arguments: &[&str]) -> ServiceProcess {
        let name = format!("{service} {instance}");
        ServiceProcess::spawn(name, self.service_command(service, instance, arguments))
    }

    fn service_command(
        &self,
        service: &str,
        instance: &str,
        arguments: &[&str],
    ) -> impl Fn() -> Command + Send + use<> {
        let (env, service) = (self.clone(), service.to_owned());
        let arguments: Vec<String> = arguments.iter().map(|&argument| argument.to_owned()).collect();
        let instance = format!("instance={}-{instance}", self.name);
        move || {
            let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
            let mut command = env.command(&service, &arguments);
            command.args(["--set", &instance]);
            command
        }
    }

    /// Starts a service, and waits until it is ready.
    #[track_caller]
    pub fn start(&self, service: &str, instance: &str, arguments: &[&str]) -> ServiceProcess {
        let mut process = self.spawn(service, instance, arguments);
        process.until_ready();
        process
    }
}
