//! The network, which a simulation replaces: the feature `simulation` uses turmoil's network in place of the kernel's,
//! and all other code is the code that runs in production.

pub mod budget;
pub mod connections;
pub mod lockout;
pub mod peer;
pub mod tls;
pub mod unfinished;

#[cfg(not(feature = "simulation"))]
pub use kernel::*;
#[cfg(feature = "simulation")]
pub use simulated::*;

#[cfg(not(feature = "simulation"))]
mod kernel {
    use std::io;
    use std::net::SocketAddr;

    pub use tokio::net::{TcpListener, TcpStream};
    use tracing::debug;

    /// Connections that the kernel holds until they are accepted; it reduces this to its own limit. Beyond it, the
    /// kernel resets clients that consider themselves connected, and a thousand workers do return at once after a
    /// restart.
    const BACKLOG: i32 = 65_535;

    /// Listens on `address`; `[::]` includes IPv4.
    // Async like the simulated one.
    #[allow(clippy::unused_async)]
    pub async fn listen(address: SocketAddr) -> io::Result<TcpListener> {
        modelrelay_platform::sockets::listen(address, BACKLOG)
    }

    /// Sets the options of an accepted connection.
    pub fn tune(stream: &TcpStream) {
        if let Err(error) = stream.set_nodelay(true) {
            debug!(%error, "cannot set TCP_NODELAY");
        }
        modelrelay_platform::sockets::watch_peer(&socket2::SockRef::from(stream));
        // Best effort, and not on Windows. Without it a cancel may wait behind megabytes on a worker's socket, and a
        // client's kernel buffers look like a client that reads fast: its window grows, and it stops with all of that
        // unread.
        #[cfg(unix)]
        if let Err(error) =
            socket2::SockRef::from(stream).set_tcp_notsent_lowat(modelrelay_protocol::limits::NOTSENT_LOWAT_BYTES)
        {
            debug!(%error, "TCP_NOTSENT_LOWAT is not available");
        }
    }
}

#[cfg(feature = "simulation")]
mod simulated {
    use std::io;
    use std::net::SocketAddr;

    pub use turmoil::net::{TcpListener, TcpStream};

    /// Listens on `address`.
    pub async fn listen(address: SocketAddr) -> io::Result<TcpListener> {
        TcpListener::bind(address).await
    }

    /// Does nothing, because the simulation has no kernel.
    pub fn tune(_stream: &TcpStream) {}
}
