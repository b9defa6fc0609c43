//! Listening sockets, and the options that make the kernel watch a connection.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::time::Duration;

use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};
use tracing::debug;

/// The time from the last byte of a silent peer to the first keep-alive probe, and between probes.
const PROBE_INTERVAL: Duration = Duration::from_secs(15);

/// The number of unanswered probes after which the connection is closed: a minute after the last byte.
const PROBES: u32 = 3;

/// Makes the kernel close a connection within a minute after its peer becomes unreachable. A peer that loses its
/// network sends nothing.
///
/// Best effort: options that a system does not support are skipped.
pub fn watch_peer(socket: &SockRef<'_>) {
    let keep_alive = TcpKeepalive::new().with_time(PROBE_INTERVAL).with_interval(PROBE_INTERVAL).with_retries(PROBES);
    if let Err(error) = socket.set_tcp_keepalive(&keep_alive) {
        debug!(%error, "cannot set TCP keep-alive");
    }
    // The kernel sends no keep-alive probes while data is unacknowledged; it would retransmit that for about 15
    // minutes.
    #[cfg(target_os = "linux")]
    if let Err(error) = socket.set_tcp_user_timeout(Some(PROBE_INTERVAL * (PROBES + 1))) {
        debug!(%error, "cannot set TCP_USER_TIMEOUT");
    }
}

/// The connections that the kernel holds until they are accepted, where no crowd arrives at once.
pub const BACKLOG: i32 = 1024;

/// Listens on `address`. `[::]` accepts IPv4 too, and stands for `0.0.0.0` on a system without IPv6, so that one
/// setting fits every cluster.
pub fn listen(address: SocketAddr, backlog: i32) -> io::Result<tokio::net::TcpListener> {
    tokio::net::TcpListener::from_std(listen_std(address, backlog)?)
}

fn listen_std(address: SocketAddr, backlog: i32) -> io::Result<TcpListener> {
    let socket = bind(address, |domain| Socket::new(domain, Type::STREAM, Some(Protocol::TCP)))?;
    socket.listen(backlog)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

fn bind(address: SocketAddr, open: impl Fn(Domain) -> io::Result<Socket>) -> io::Result<Socket> {
    let is_every_address = address.is_ipv6() && address.ip().is_unspecified();
    let socket = match open(Domain::for_address(address)) {
        // Whatever else the reason may be, IPv4 then fails with the same error.
        Err(error) if is_every_address => return bind_ipv4(address.port(), &error, open),
        opened => opened?,
    };
    // Otherwise the port of a program that just ended could not be used for a minute. On Windows it can, and this
    // option would let other programs use it at the same time.
    socket.set_reuse_address(cfg!(unix))?;
    if is_every_address {
        socket.set_only_v6(false)?;
    }
    match socket.bind(&address.into()) {
        Err(error) if is_every_address && error.kind() == io::ErrorKind::AddrNotAvailable => {
            bind_ipv4(address.port(), &error, open)
        }
        bound => bound.map(|()| socket),
    }
}

fn bind_ipv4(port: u16, error: &io::Error, open: impl Fn(Domain) -> io::Result<Socket>) -> io::Result<Socket> {
    debug!(%error, "IPv6 is not available; listening on 0.0.0.0");
    bind(SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)), open)
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv6Addr, TcpStream};

    use super::*;

    fn open_ipv4_only(domain: Domain) -> io::Result<Socket> {
        match domain {
            Domain::IPV6 => Err(io::Error::other("address family not supported by protocol")),
            domain => Socket::new(domain, Type::STREAM, None),
        }
    }

    #[test]
    fn every_address_is_ipv4_without_ipv6() {
        let socket = bind((Ipv6Addr::UNSPECIFIED, 0).into(), open_ipv4_only).unwrap();
        let local = socket.local_addr().unwrap().as_socket().unwrap();
        assert_eq!(local.ip(), Ipv4Addr::UNSPECIFIED);
        // Only that address has a counterpart.
        assert!(bind((Ipv6Addr::LOCALHOST, 0).into(), open_ipv4_only).is_err());
    }

    #[test]
    fn every_ipv6_address_includes_ipv4() {
        let listener = listen_std((Ipv6Addr::UNSPECIFIED, 0).into(), 16).unwrap();
        let port = listener.local_addr().unwrap().port();
        TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
        // A machine without IPv6 passes with the address above.
        if listener.local_addr().unwrap().is_ipv6() {
            TcpStream::connect((Ipv6Addr::LOCALHOST, port)).unwrap();
        }
    }

    #[test]
    fn occupied_port_is_an_error() {
        let taken = listen_std((Ipv6Addr::UNSPECIFIED, 0).into(), 16).unwrap();
        let error = listen_std(taken.local_addr().unwrap(), 16).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
    }
}
