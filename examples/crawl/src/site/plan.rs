//! What a site has: hosts, pages, links, and how each page behaves.

use std::time::Duration;

/// A site.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Its hosts. The crawl begins at page 0 of host 0.
    pub hosts: Vec<HostPlan>,
}

/// A host.
#[derive(Clone, Debug)]
pub struct HostPlan {
    /// What people call it.
    pub name: &'static str,
    /// The pause that its `/robots.txt` asks for.
    pub crawl_delay: Option<Duration>,
    /// How its `/robots.txt` behaves.
    pub robots: RobotsPlan,
    /// Its pages by number.
    pub pages: Vec<PagePlan>,
}

/// How a `/robots.txt` behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RobotsPlan {
    /// 404.
    Missing,
    /// 503 for so many times, 0 for none, then the file.
    Busy(u32),
}

/// A page.
#[derive(Clone, Debug)]
pub struct PagePlan {
    /// How it behaves.
    pub behaviour: Behaviour,
    /// Whether `/robots.txt` forbids it.
    pub is_private: bool,
    /// Where it links to.
    pub links: Vec<Link>,
}

/// A page of a site, by the numbers of host and page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    /// The host.
    pub host: usize,
    /// The page of it.
    pub page: usize,
}

/// How a page behaves. `u32::MAX` times is for ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Behaviour {
    /// 200.
    Fine,
    /// 503 for so many times, then 200.
    Busy(u32),
    /// 503 with `Retry-After` for so many times, then 200.
    Asks {
        /// How often.
        times: u32,
        /// Whole seconds.
        wait: Duration,
    },
    /// No answer for so many times, then 200.
    Hangs(u32),
    /// 404, though others link to it.
    Missing,
    /// 410.
    Gone,
    /// 301.
    Moved(Link),
}

impl Plan {
    /// The demonstration's site: 54 pages on five hosts, with every kind of trouble.
    #[must_use]
    pub fn demonstration() -> Self {
        let millis = Duration::from_millis;
        let wait = Duration::from_secs(2);
        let moved = Behaviour::Moved(Link { host: 1, page: 6 });
        let asks = Behaviour::Asks { times: 1, wait };
        let mut plan = Self {
            hosts: vec![
                HostPlan::new("library", Some(millis(250)), 16)
                    .with(3, Behaviour::Busy(1))
                    .with(7, Behaviour::Gone)
                    .with(11, Behaviour::Hangs(1)),
                HostPlan::new("museum", Some(millis(500)), 12)
                    .with(2, asks)
                    .with(5, moved)
                    .with(9, Behaviour::Busy(2)),
                HostPlan::new("gazette", None, 12)
                    .robots(RobotsPlan::Missing)
                    .with(4, Behaviour::Missing)
                    .with(8, Behaviour::Busy(u32::MAX)),
                HostPlan::new("archive", Some(millis(1_000)), 8)
                    .robots(RobotsPlan::Busy(1))
                    .with(3, Behaviour::Hangs(u32::MAX)),
                HostPlan::new("office", Some(millis(2_500)), 6).private(5),
            ],
        };
        plan.link_all();
        plan
    }

    /// Links the pages of each host as a tree with short cuts, and each host with the next one.
    pub fn link_all(&mut self) {
        let sizes: Vec<usize> = self.hosts.iter().map(|host| host.pages.len()).collect();
        for (host, plan) in self.hosts.iter_mut().enumerate() {
            let next = (host + 1) % sizes.len();
            for (page, plan) in plan.pages.iter_mut().enumerate() {
                let here = [2 * page + 1, 2 * page + 2, page + 1, page / 2];
                plan.links = here
                    .into_iter()
                    .filter(|page| *page < sizes[host])
                    .map(|page| Link { host, page })
                    .collect();
                plan.links.push(Link {
                    host: next,
                    page: page % sizes[next],
                });
                plan.links.dedup();
            }
        }
    }
}

impl HostPlan {
    /// A host with so many pages, all of them fine and without links.
    #[must_use]
    pub fn new(name: &'static str, crawl_delay: Option<Duration>, pages: usize) -> Self {
        let page = PagePlan {
            behaviour: Behaviour::Fine,
            is_private: false,
            links: Vec::new(),
        };
        Self {
            name,
            crawl_delay,
            robots: RobotsPlan::Busy(0),
            pages: vec![page; pages],
        }
    }

    /// With a page that behaves otherwise.
    #[must_use]
    pub fn with(mut self, page: usize, behaviour: Behaviour) -> Self {
        self.pages[page].behaviour = behaviour;
        self
    }

    /// With a page that `/robots.txt` forbids.
    #[must_use]
    pub fn private(mut self, page: usize) -> Self {
        self.pages[page].is_private = true;
        self
    }

    /// With a `/robots.txt` that behaves otherwise.
    #[must_use]
    pub fn robots(mut self, robots: RobotsPlan) -> Self {
        self.robots = robots;
        self
    }
}
