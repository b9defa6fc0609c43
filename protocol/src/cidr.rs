//! Networks of IP addresses.

use std::net::IpAddr;
use std::str::FromStr;

use ipnet::IpNet;

/// A network such as `10.0.0.0/8`, or one address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cidr(IpNet);

impl Cidr {
    /// True if `address` is in this network; an IPv4 address written as IPv6 is treated as IPv4.
    pub fn contains(&self, address: IpAddr) -> bool {
        self.0.contains(&address.to_canonical())
    }
}

impl FromStr for Cidr {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let network = parse(text).ok_or_else(|| format!("{text:?} is not an address or network such as 10.0.0.0/8"))?;
        Ok(Self(network.trunc()))
    }
}

/// Not with `IpNet`'s own parser, which requires a prefix and accepts ambiguous addresses such as 010.0.0.1.
fn parse(text: &str) -> Option<IpNet> {
    let Some((address, prefix)) = text.split_once('/') else {
        return text.parse::<IpAddr>().ok().map(IpNet::from);
    };
    let is_number = prefix.bytes().all(|byte| byte.is_ascii_digit());
    IpNet::new(address.parse().ok()?, prefix.parse::<u8>().ok().filter(|_| is_number)?).ok()
}

/// The first `prefix` bits of an address; `None` if the address has fewer.
pub fn masked(address: IpAddr, prefix: u8) -> Option<IpAddr> {
    Some(IpNet::new(address, prefix).ok()?.network())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_contain_their_addresses() {
        let contains = |network: &str, text: &str| {
            network.parse::<Cidr>().expect("a network").contains(text.parse().expect("an address"))
        };
        assert!(contains("10.0.0.0/8", "10.255.0.1") && contains("10.0.0.0/8", "::ffff:10.1.1.1"));
        assert!(!contains("10.0.0.0/8", "11.0.0.1") && !contains("0.0.0.0/0", "::1"));
        assert!(contains("0.0.0.0/0", "8.8.8.8") && contains("::/0", "2001:db8::1"));
        assert!(contains("fd00::/8", "fd12::1") && contains("192.0.2.1", "192.0.2.1"));
        assert!(contains("10.1.2.3/8", "10.255.0.1") && contains("10.0.0.0/008", "10.0.0.1"));
        assert!(!contains("::ffff:10.0.0.0/104", "10.0.0.1") && !contains("::ffff:10.0.0.1", "10.0.0.1"));
        for text in ["", "10.0.0.0/33", "10.0.0/8", "010.0.0.0/8", "::/129", "10.0.0.0/", "10.0.0.0/+8", "host"] {
            assert!(text.parse::<Cidr>().is_err(), "{text}");
        }
    }
}
