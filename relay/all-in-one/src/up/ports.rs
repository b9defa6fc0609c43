//! Free ports of this machine.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};

/// Windows takes two seconds to report that nothing listens on a port.
const DIAL_TIMEOUT: Duration = Duration::from_millis(300);

/// The first port from `first` on that nothing answers, or any free one for 0. A port is not bound to find out: another
/// run that starts at the same time would take it for an occupied one, or fail to listen.
pub(super) async fn free_port(ip: IpAddr, first: u16) -> Result<SocketAddr, String> {
    if first == 0 {
        let any = bind(SocketAddr::new(ip, 0)).await;
        return any.map_err(|error| format!("cannot listen on {ip}: {error}"));
    }
    for port in first..=u16::MAX {
        let addr = SocketAddr::new(ip, port);
        if !is_answered(addr).await {
            return Ok(addr);
        }
    }
    Err(format!("no free port on {ip} from {first} upwards"))
}

/// True if a program could listen there. Some systems let a second program listen on a port that a first one has on
/// every address of the machine, so the port is dialled too.
pub(super) async fn is_free(addr: SocketAddr) -> bool {
    !is_answered(addr).await && bind(addr).await.is_ok()
}

/// Returns the address that was bound for a moment.
async fn bind(addr: SocketAddr) -> io::Result<SocketAddr> {
    TcpListener::bind(addr).await?.local_addr()
}

async fn is_answered(addr: SocketAddr) -> bool {
    matches!(tokio::time::timeout(DIAL_TIMEOUT, TcpStream::connect(addr)).await, Ok(Ok(_)))
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[tokio::test]
    async fn taken_port_gives_way_to_a_later_one() {
        let taken = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).await.unwrap().local_addr().unwrap();
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, taken.port())).await.unwrap();
        let first = listener.local_addr().unwrap().port();
        let free = free_port(Ipv4Addr::LOCALHOST.into(), first).await.unwrap();
        assert!(free.port() > first, "{free}");
    }

    #[tokio::test]
    async fn port_zero_yields_any_free_port() {
        let free = free_port(Ipv4Addr::LOCALHOST.into(), 0).await.unwrap();
        assert!(free.port() != 0 && is_free(free).await, "{free}");
    }
}
