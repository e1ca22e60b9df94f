//! Schedulers of a former version and of this one side by side, as in a rolling upgrade.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use redeliver_testkit::{
    ChaosPermit, ServiceProcess, chaos_random, former_binaries, sleep_up_to, until_shared,
};

use super::load::under_load;
use super::{PARTITIONS, SchedulerEnv, setup};

const ROUNDS: usize = 3;
/// Lines of the configuration that the former version does not know, and refuses.
const UNKNOWN: [&str; 2] = ["control:", "audit:"];

/// Shards move from the former version to this one and back, under kills, until only this version runs. So each version reads what the
/// other one has written.
#[test]
#[ignore = "long"]
fn a_rolling_upgrade_from_the_former_version_loses_and_duplicates_nothing() {
    let former = former_binaries("before-control");
    let _permit = ChaosPermit::acquire();
    let mut random = chaos_random("former");
    let env = SchedulerEnv::new(setup("former").set("kafka.static_membership", "false"));
    let versions = Versions {
        yaml: env.test.yaml(),
        env: &env,
        former,
    };
    let mut pair = ["a", "b"].map(|instance| env.spawn(instance));
    for member in &mut pair {
        member.kill_9();
        versions.start_former(member);
    }
    let done = under_load(&env, &mut random, 150, |load, random| {
        until_shared(&mut pair, PARTITIONS.into());
        load.until_more_ended(300);
        for round in 0..ROUNDS {
            pair[0].shut_down();
            versions.start_present(&mut pair[0]);
            until_shared(&mut pair, PARTITIONS.into());
            load.until_more_ended(300);
            // This version takes over from the former one, and then the former one from this one.
            for (killed, survivor) in [(1, 0), (0, 1)] {
                sleep_up_to(random, Duration::from_millis(500));
                pair[killed].kill_9();
                pair[survivor].until_owning(PARTITIONS.into());
                load.until_more_ended(150);
                match killed {
                    1 => versions.start_former(&mut pair[1]),
                    _ => versions.start_present(&mut pair[0]),
                }
                until_shared(&mut pair, PARTITIONS.into());
                load.until_more_ended(150);
            }
            if round + 1 < ROUNDS {
                // A rollback.
                pair[0].shut_down();
                versions.start_former(&mut pair[0]);
                until_shared(&mut pair, PARTITIONS.into());
                load.until_more_ended(150);
            }
        }
        pair[1].shut_down();
        versions.start_present(&mut pair[1]);
        until_shared(&mut pair, PARTITIONS.into());
        load.until_more_ended(300);
    });
    println!("{}\n{}\n{}", done.settle(), pair[0], pair[1]);
}

struct Versions<'a> {
    env: &'a SchedulerEnv,
    yaml: String,
    former: PathBuf,
}

impl Versions<'_> {
    fn start_former(&self, member: &mut ServiceProcess) {
        let is_known = |line: &&str| !UNKNOWN.iter().any(|key| line.starts_with(key));
        let known: Vec<&str> = self.yaml.lines().filter(is_known).collect();
        fs::write(self.env.test.file(), known.join("\n")).unwrap();
        member.start_again_from(&self.former);
        member.until_ready();
    }

    fn start_present(&self, member: &mut ServiceProcess) {
        fs::write(self.env.test.file(), &self.yaml).unwrap();
        member.start_again();
        member.until_ready();
    }
}
