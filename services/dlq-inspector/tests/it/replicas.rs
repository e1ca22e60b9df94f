//! Two inspectors behind one address: each call may reach another one.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use redeliver_proto::auth::SendToken;
use redeliver_proto::v1;
use redeliver_proto::v1::watch_dead_letters_response::Event;
use redeliver_testkit::{ensure, eventually_async};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tonic::transport::Endpoint;
use tonic::{Status, Streaming};

use crate::support::{
    Client, DEADLINE, Dead, Inspector, InspectorEnv, Sending, dead, get_stats, list_groups,
};

const CLASSES: [&str; 2] = ["permanent", "expired"];

/// An address whose connections go to several servers in turn, and to the next one if a server is down.
struct Balancer {
    address: SocketAddr,
    // Ends when this is dropped.
    _task: JoinSet<()>,
}

impl Balancer {
    async fn new(servers: Vec<SocketAddr>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut task = JoinSet::new();
        task.spawn(async move {
            let mut connections = JoinSet::new();
            let turn = Arc::new(AtomicUsize::new(0));
            loop {
                let (mut client, _) = listener.accept().await.unwrap();
                let (servers, turn) = (servers.clone(), turn.clone());
                connections.spawn(async move {
                    for _ in 0..servers.len() {
                        let server = servers[turn.fetch_add(1, Ordering::Relaxed) % servers.len()];
                        if let Ok(mut server) = TcpStream::connect(server).await {
                            // One of them hangs up.
                            drop(tokio::io::copy_bidirectional(&mut client, &mut server).await);
                            return;
                        }
                    }
                });
            }
        });
        Self { address, _task: task }
    }

    /// A client with a connection of its own, which goes to the next server.
    async fn client(&self) -> Client {
        let endpoint = Endpoint::from_shared(format!("http://{}", self.address)).unwrap();
        Client::new(Sending::new(
            endpoint.connect().await.unwrap(),
            SendToken::default(),
        ))
    }
}

/// Two inspectors of the same topics, each with an index of its own and a port that it keeps.
struct Replicas {
    env: InspectorEnv,
    topic: Arc<str>,
    balancer: Balancer,
    running: Vec<Inspector>,
    ports: Vec<u16>,
}

impl Replicas {
    async fn start(name: &str, letters: usize) -> Self {
        let env = InspectorEnv::new(name);
        let topic = env.create_topic("a", 2).await;
        let ports = [0; 2].map(|_| redeliver_testkit::free_port());
        let servers = ports.map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
        let mut replicas = Self {
            env,
            topic,
            balancer: Balancer::new(servers.to_vec()).await,
            running: Vec::new(),
            ports: ports.to_vec(),
        };
        replicas.put("old", letters).await;
        for number in 0..ports.len() {
            let started = replicas.spawn(number).await;
            replicas.running.push(started);
        }
        replicas
    }

    async fn spawn(&mut self, number: usize) -> Inspector {
        self.env.use_data_dir(&format!("data-{number}"));
        let listen = format!("127.0.0.1:{}", self.ports[number]);
        self.env.base.set("dlq_inspector.listen", &listen);
        self.env.start().await
    }

    /// Writes half of the dead letters to each partition.
    async fn put(&self, name: &str, count: usize) {
        for partition in 0..2_u8 {
            let number = |index: usize| 2 * index + usize::from(partition);
            let letter = |index| -> Dead {
                let class = CLASSES[index % CLASSES.len()];
                dead(
                    &format!("{name}-{}", number(index)),
                    "v",
                    &[("error-class", class)],
                )
            };
            let letters = (0..count / 2).map(letter).collect();
            self.env.put(&self.topic, partition.into(), letters).await;
        }
    }

    /// Kills a replica, and deletes its index.
    fn lose(&mut self, number: usize) {
        self.running[number].process.kill_9();
        let directory = self.env.base.directory().join(format!("data-{number}"));
        std::fs::remove_dir_all(directory).unwrap();
    }

    async fn replace(&mut self, number: usize) {
        self.running[number] = self.spawn(number).await;
    }

    /// A page of a list, by the replica whose turn it is.
    async fn page(&self, request: &v1::ListDeadLettersRequest) -> v1::ListDeadLettersResponse {
        let mut client = self.balancer.client().await;
        let page = client.list_dead_letters(request.clone()).await;
        page.unwrap().into_inner()
    }

    /// Each replica is asked itself.
    async fn clients(&mut self) -> Vec<Client> {
        let mut clients = Vec::new();
        for inspector in &mut self.running {
            clients.push(inspector.client().await);
        }
        clients
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn replicas_agree_after_a_lost_index() {
    let mut replicas = Replicas::start("replica-pages", 120).await;
    let mut request = v1::ListDeadLettersRequest {
        page_size: 7,
        ..v1::ListDeadLettersRequest::default()
    };
    let (mut listed, mut pages) = (Vec::new(), 0);
    loop {
        let page = replicas.page(&request).await;
        listed.extend(page.dead_letters);
        pages += 1;
        match pages {
            5 => replicas.lose(0),
            9 => replicas.replace(0).await,
            _ => {}
        }
        request.page_token = page.next_page_token;
        if request.page_token.is_empty() {
            break;
        }
    }
    assert_eq!(pages, 18);
    let times: Vec<_> = listed
        .iter()
        .map(|letter| letter.dead_at.map(|time| (time.seconds, time.nanos)))
        .collect();
    assert!(times.is_sorted_by(|one, other| one >= other), "{times:?}");
    let ids: BTreeSet<String> = listed.iter().map(|letter| letter.id.clone()).collect();
    assert_eq!((listed.len(), ids.len()), (120, 120));

    // Each survey of the topics, every few seconds, tells a new replica how far it is behind and how retention removes records.
    let clients = &mut replicas.clients().await;
    let (stats, groups) = eventually_async("the same counts", DEADLINE, async || {
        let mut answers = Vec::new();
        for client in &mut *clients {
            answers.push(counts(client).await);
        }
        ensure(answers[0] == answers[1], format!("{answers:#?}")).map(|()| answers.swap_remove(0))
    })
    .await;
    assert_eq!((stats.topics[0].total, stats.topics[0].open), (120, Some(120)));
    assert_eq!(groups.len(), CLASSES.len());
}

/// What a replica counts, without what depends on the time of the call.
async fn counts(client: &mut Client) -> (v1::DeadLetterStats, Vec<v1::Group>) {
    let mut stats = get_stats(client, "").await;
    stats.completeness = None;
    for topic in &mut stats.topics {
        topic.until_removal = None;
        (topic.last_minute, topic.last_hour) = (0, 0);
    }
    let mut groups = list_groups(client, "").await.groups;
    for group in &mut groups {
        group.trend.clear();
    }
    (stats, groups)
}

/// A client that watches, and resumes with its last token.
pub(crate) struct Watcher {
    request: v1::WatchDeadLettersRequest,
    pub(crate) received: Vec<String>,
    is_synced: bool,
}

impl Watcher {
    pub(crate) fn new(filter: &str, only_new: bool) -> Self {
        Self {
            request: v1::WatchDeadLettersRequest {
                filter: filter.to_owned(),
                only_new,
                ..v1::WatchDeadLettersRequest::default()
            },
            received: Vec::new(),
            is_synced: false,
        }
    }

    pub(crate) async fn connect(
        &mut self,
        client: &mut Client,
    ) -> Result<Streaming<v1::WatchDeadLettersResponse>, Status> {
        self.is_synced = false;
        let stream = client.watch_dead_letters(self.request.clone()).await?;
        Ok(stream.into_inner())
    }

    /// Receives until `is_done`, or the stream ends.
    pub(crate) async fn follow(
        &mut self,
        stream: &mut Streaming<v1::WatchDeadLettersResponse>,
        is_done: impl Fn(&Self) -> bool,
    ) -> Result<(), Status> {
        while !is_done(self) {
            let message = timeout(DEADLINE, stream.message()).await.expect("an event");
            let message = message?.expect("a watch ends with a status");
            self.request.resume_token = message.resume_token;
            match message.event.unwrap() {
                Event::DeadLetter(letter) => self.received.push(letter.id),
                Event::Synced(_) => self.is_synced = true,
                Event::Heartbeat(_) => {}
            }
        }
        Ok(())
    }

    /// Connects, and receives until there are this many dead letters and no more existing ones.
    pub(crate) async fn resume(&mut self, client: &mut Client, count: usize) {
        let mut stream = self.connect(client).await.unwrap();
        let is_done = |watcher: &Self| watcher.is_synced && watcher.received.len() >= count;
        self.follow(&mut stream, is_done).await.unwrap();
        let distinct: BTreeSet<&String> = self.received.iter().collect();
        assert_eq!((self.received.len(), distinct.len()), (count, count));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn watch_continues_at_another_replica() {
    let mut replicas = Replicas::start("replica-watch", 60).await;
    let mut all = Watcher::new("", false);
    // The connections go to the replicas in turn.
    let mut stream = all.connect(&mut replicas.balancer.client().await).await.unwrap();
    all.follow(&mut stream, |watcher| watcher.received.len() == 25)
        .await
        .unwrap();
    let mut new = Watcher::new("error_class = permanent", true);
    new.resume(&mut replicas.balancer.client().await, 0).await;
    replicas.lose(0);
    replicas.put("first", 20).await;
    let broken = all.follow(&mut stream, |_| false).await;
    assert!(broken.is_err());
    all.resume(&mut replicas.balancer.client().await, 80).await;
    new.resume(&mut replicas.balancer.client().await, 10).await;

    // The rebuilt index of the first replica is another index. Each replica gets tokens of the other one, and of itself.
    replicas.replace(0).await;
    for (round, name) in (1..).zip(["second", "third", "fourth"]) {
        replicas.put(name, 20).await;
        // The second time to the same replicas, and in the next round to the other ones.
        for _ in 0..2 {
            let mut client = replicas.balancer.client().await;
            all.resume(&mut client, 80 + round * 20).await;
            let mut client = replicas.balancer.client().await;
            new.resume(&mut client, 10 + round * 10).await;
        }
        drop(replicas.balancer.client().await);
    }
}
