//! A simulated second machine: another network namespace, with a cable between it and the test's own.

use modelrelay_harness::process::{Process, Spawn};
use tokio::process::Command;

/// The near end of the cable.
pub const HERE: &str = "10.77.0.1";
/// The far end.
pub const THERE: &str = "10.77.0.2";

const CABLE: &str = "chaos-here";
const FAR_CABLE: &str = "chaos-there";

/// The direction in which a cable drops packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cut {
    /// From the far side to the near side.
    Incoming,
    /// From the near side to the far side.
    Outgoing,
    /// Both ways.
    Both,
}

/// The other machine, which exists as long as this value. It must be created inside the test's own namespace.
#[derive(Debug)]
pub struct FarSide {
    keeper: Process,
}

impl FarSide {
    /// Creates it with a cable.
    ///
    /// # Panics
    /// If `ip` fails.
    pub async fn new() -> Self {
        let script = "ip link set lo up && echo ready && exec sleep infinity";
        let keeper = Spawn::program("/usr/bin/env").arg("unshare").arg("--net").arg("sh").arg("-c").arg(script).start();
        keeper.wait_for_line("ready").await;
        let far = Self { keeper };
        let pid = far.pid();
        run(&format!("ip link add name {CABLE} type veth peer name {FAR_CABLE} netns {pid}")).await;
        run(&format!("ip addr add {HERE}/24 dev {CABLE}")).await;
        run(&format!("ip link set {CABLE} up")).await;
        far.run(&format!("ip addr add {THERE}/24 dev {FAR_CABLE}")).await;
        far.run(&format!("ip link set {FAR_CABLE} up")).await;
        far
    }

    /// Returns the command prefix that runs a program there.
    #[must_use]
    pub fn enter(&self) -> [String; 4] {
        ["nsenter".to_owned(), "-t".to_owned(), self.pid().to_string(), "-n".to_owned()]
    }

    /// Drops everything in that direction silently.
    pub async fn cut(&self, cut: Cut) {
        if cut != Cut::Outgoing {
            run(&format!("iptables -w -A INPUT -i {CABLE} -j DROP")).await;
        }
        if cut != Cut::Incoming {
            run(&format!("iptables -w -A OUTPUT -o {CABLE} -j DROP")).await;
        }
    }

    /// Restores the cable.
    pub async fn heal(&self) {
        run("iptables -w -F").await;
    }

    /// Limits the bandwidth to this number of megabits per second, each way.
    pub async fn limit(&self, megabits: u32) {
        let tbf = |cable| format!("tc qdisc replace dev {cable} root tbf rate {megabits}mbit burst 16kb latency 100ms");
        run(&tbf(CABLE)).await;
        self.run(&tbf(FAR_CABLE)).await;
    }

    async fn run(&self, command: &str) {
        run(&format!("{} {command}", self.enter().join(" "))).await;
    }

    fn pid(&self) -> u32 {
        self.keeper.pid().expect("it sleeps")
    }
}

async fn run(command: &str) {
    let output = Command::new("sh").args(["-c", command]).output().await.expect("a shell");
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Returns the reason that this machine cannot simulate another one, if any. Must be called inside a namespace.
pub async fn missing() -> Option<String> {
    for tool in ["iptables -w -L", "tc -V", "nsenter -V"] {
        let tried = Command::new("sh").args(["-c", tool]).output().await;
        if !tried.is_ok_and(|output| output.status.success()) {
            return Some(format!("{tool} does not work here"));
        }
    }
    None
}
