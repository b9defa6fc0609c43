//! Networks of IP addresses.

use std::net::IpAddr;
use std::str::FromStr;

/// A network such as `10.0.0.0/8`, or one address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cidr {
    network: IpAddr,
    prefix: u8,
}

impl Cidr {
    /// True if `address` is in this network; an IPv4 address written as IPv6 is treated as IPv4.
    pub fn contains(&self, address: IpAddr) -> bool {
        masked(address.to_canonical(), self.prefix) == Some(self.network)
            && address.to_canonical().is_ipv4() == self.network.is_ipv4()
    }
}

impl FromStr for Cidr {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let refused = || format!("{text:?} is not an address or network such as 10.0.0.0/8");
        let (address, prefix) = match text.split_once('/') {
            Some((address, prefix)) => (address, Some(prefix)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().map_err(|_| refused())?;
        let full = if address.is_ipv4() { 32 } else { 128 };
        let prefix = match prefix {
            Some(prefix) if prefix.bytes().all(|byte| byte.is_ascii_digit()) => {
                prefix.parse().map_err(|_| refused())?
            }
            Some(_) => return Err(refused()),
            None => full,
        };
        masked(address, prefix).map(|network| Self { network, prefix }).ok_or_else(refused)
    }
}

impl std::fmt::Display for Cidr {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.network, self.prefix)
    }
}

/// The first `prefix` bits of an address; `None` if the address has fewer.
pub fn masked(address: IpAddr, prefix: u8) -> Option<IpAddr> {
    match address {
        IpAddr::V4(address) if prefix <= 32 => {
            let mask = u32::MAX.checked_shl(32 - u32::from(prefix)).unwrap_or(0);
            Some(IpAddr::from((u32::from(address) & mask).to_be_bytes()))
        }
        IpAddr::V6(address) if prefix <= 128 => {
            let mask = u128::MAX.checked_shl(128 - u32::from(prefix)).unwrap_or(0);
            Some(IpAddr::from((u128::from(address) & mask).to_be_bytes()))
        }
        IpAddr::V4(_) | IpAddr::V6(_) => None,
    }
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
        for text in ["", "10.0.0.0/33", "10.0.0/8", "::/129", "10.0.0.0/", "10.0.0.0/+8", "host"] {
            assert!(text.parse::<Cidr>().is_err(), "{text}");
        }
    }
}
