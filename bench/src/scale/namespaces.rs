//! Three networks with a cable between each two: one of the client, one of the relay, and one of the worker with its
//! backend.
//!
//! Their names contain the process id, so that two runs do not collide. They are deleted when this is dropped, also
//! when a run fails or is interrupted.

use std::process::{Command, Stdio};

/// The programs with a network of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Client,
    Relay,
    Worker,
}

/// The networks, while this value exists.
#[derive(Debug)]
pub(super) struct Namespaces {
    prefix: String,
}

impl Place {
    const ALL: [Self; 3] = [Self::Client, Self::Relay, Self::Worker];

    fn name(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Relay => "relay",
            Self::Worker => "worker",
        }
    }
}

/// Cables: the two ends, and the first three numbers of their addresses. The last number is 1 or 2.
const CABLES: [(Place, Place, &str); 3] = [
    (Place::Client, Place::Relay, "10.77.1"),
    (Place::Relay, Place::Worker, "10.77.2"),
    (Place::Client, Place::Worker, "10.77.3"),
];

impl Namespaces {
    /// Creates the networks; returns why they are not available.
    pub(super) fn new() -> Result<Self, String> {
        let namespaces = Self { prefix: format!("modelrelay-bench-{}", std::process::id()) };
        for place in Place::ALL {
            let name = namespaces.name(place);
            ip(&["netns", "add", &name])?;
            ip(&["-n", &name, "link", "set", "lo", "up"])?;
        }
        for (one, two, net) in CABLES {
            let (first, second) = (namespaces.name(one), namespaces.name(two));
            let (to_second, to_first) = (format!("to-{}", two.name()), format!("to-{}", one.name()));
            let peer = ["type", "veth", "peer", "name", &to_first, "netns", &second];
            ip(&[&["-n", &first, "link", "add", &to_second][..], &peer].concat())?;
            for (name, device, last) in [(&first, &to_second, 1), (&second, &to_first, 2)] {
                ip(&["-n", name, "addr", "add", &format!("{net}.{last}/24"), "dev", device])?;
                ip(&["-n", name, "link", "set", device, "up"])?;
            }
        }
        Ok(namespaces)
    }

    /// The command that runs a program in one of them.
    pub(super) fn under(&self, place: Place) -> Vec<String> {
        ["ip", "netns", "exec"].map(str::to_owned).into_iter().chain([self.name(place)]).collect()
    }

    /// The address of `to`, as seen from `from`.
    pub(super) fn address(from: Place, to: Place) -> String {
        let cable = |(one, two, net): &(Place, Place, &str)| match (from, to) {
            (a, b) if (a, b) == (*one, *two) => Some(format!("{net}.2")),
            (a, b) if (a, b) == (*two, *one) => Some(format!("{net}.1")),
            _ => None,
        };
        CABLES.iter().find_map(cable).unwrap_or_else(|| "127.0.0.1".to_owned())
    }

    fn name(&self, place: Place) -> String {
        format!("{}-{}", self.prefix, place.name())
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        // A network that was never created cannot be removed, which is fine.
        for place in Place::ALL {
            let _ = ip(&["netns", "del", &self.name(place)]);
        }
    }
}

fn ip(args: &[&str]) -> Result<(), String> {
    let output = Command::new("ip").args(args).stdin(Stdio::null()).output().map_err(|error| format!("ip: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let stderr = String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; ");
    Err(format!("no network namespaces, which need root and ip: {stderr}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_is_other_end_of_shared_cable() {
        let seen = [
            (Place::Client, Place::Relay, "10.77.1.2"),
            (Place::Relay, Place::Client, "10.77.1.1"),
            (Place::Worker, Place::Relay, "10.77.2.1"),
            (Place::Client, Place::Worker, "10.77.3.2"),
            (Place::Worker, Place::Worker, "127.0.0.1"),
        ];
        for (from, to, address) in seen {
            assert_eq!(Namespaces::address(from, to), address);
        }
    }
}
