//! Outgoing connections, plain or TLS, of both kinds: to relays, possibly through a proxy, and to the backend.

mod proxy;

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use url::Url;

pub use network::{TcpStream, look_up, tune_for_relay};
use network::{dial, dial_name};
pub use proxy::Proxy;

/// The time from the first packet to the end of the TLS handshake.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// A connected socket.
#[derive(Debug)]
pub enum Stream {
    /// TCP.
    Plain(TcpStream),
    /// TLS over TCP.
    Tls(Box<TlsStream<TcpStream>>),
    /// TLS through the tunnel of a proxy, which may itself be reached over TLS.
    Tunnelled(Box<TlsStream<Stream>>),
}

/// The trusted certificates: the system's roots, and those of a file. They are read on first use, because most workers
/// need neither and the system's roots take a megabyte; and again whenever the file's content has changed, because CAs
/// are renewed while workers run.
#[derive(Debug)]
pub struct Trust {
    system: bool,
    extra: Option<PathBuf>,
    made: Mutex<Option<Made>>,
}

/// The TLS configuration for a file's content.
#[derive(Debug)]
struct Made {
    extra: Vec<u8>,
    config: Arc<ClientConfig>,
}

impl Trust {
    /// Trusts the system's roots and the certificates in `extra`.
    pub fn new(extra: Option<PathBuf>) -> Self {
        Self { system: true, extra, made: Mutex::default() }
    }

    /// Trusts only the certificates in `file`.
    pub fn only(file: PathBuf) -> Self {
        Self { system: false, extra: Some(file), made: Mutex::default() }
    }

    /// Reads `extra`, so that an invalid file is detected at the start.
    pub fn check(&self) -> io::Result<()> {
        self.read_extra()?.map(|pem| certificates(&pem)).transpose().map(|_| ())
    }

    fn connector(&self) -> io::Result<TlsConnector> {
        // Held while a small file is read; only concurrent dials wait for it.
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        let extra = self.read_extra();
        let config = match (made.as_ref(), extra) {
            (Some(made), Ok(extra)) if made.extra == extra.as_deref().unwrap_or_default() => made.config.clone(),
            (Some(made), Err(_)) => made.config.clone(),
            (before, extra) => match (before, self.make(extra?.unwrap_or_default())) {
                // The file is incomplete, or is being replaced: keep the previous configuration.
                (Some(before), Err(_)) => before.config.clone(),
                (_, new) => made.insert(new?).config.clone(),
            },
        };
        Ok(TlsConnector::from(config))
    }

    fn make(&self, extra: Vec<u8>) -> io::Result<Made> {
        let mut roots = RootCertStore::empty();
        if self.system {
            let (_, _) = roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        }
        if self.extra.is_some() {
            let (_, _) = roots.add_parsable_certificates(certificates(&extra)?);
        }
        if roots.is_empty() {
            return Err(io::Error::other("no trusted certificates: neither the system's roots nor a CA file"));
        }
        let config = Arc::new(ClientConfig::builder().with_root_certificates(roots).with_no_client_auth());
        Ok(Made { extra, config })
    }

    fn read_extra(&self) -> io::Result<Option<Vec<u8>>> {
        let read = |path: &PathBuf| std::fs::read(path).map_err(|error| unreadable(&error));
        self.extra.as_ref().map(read).transpose()
    }
}

fn certificates(pem: &[u8]) -> io::Result<Vec<CertificateDer<'static>>> {
    match CertificateDer::pem_slice_iter(pem).collect::<Result<Vec<_>, _>>() {
        Ok(certificates) if !certificates.is_empty() => Ok(certificates),
        Ok(_) => Err(io::Error::other("the file contains no PEM certificate")),
        Err(error) => Err(unreadable(&error)),
    }
}

fn unreadable(error: &dyn std::fmt::Display) -> io::Error {
    io::Error::other(format!("cannot parse the file as PEM certificates: {error}"))
}

/// Connects to `host:port`, or to one of the addresses `to` instead, if there are any; the certificate must always be
/// for `host`.
pub async fn connect(host: &str, port: u16, to: &[SocketAddr], tls: Option<&Trust>) -> io::Result<Stream> {
    // Boxed: every request holds this future, and few of them dial.
    in_time("no connection within 10 s", Box::pin(connect_directly(host, port, to, tls))).await
}

/// Like [`connect`], to the host of a URL; with TLS if that is `https`.
pub fn connect_to<'a>(
    url: &'a Url,
    to: &'a [SocketAddr],
    trust: &'a Trust,
) -> impl Future<Output = io::Result<Stream>> + 'a {
    let (host, port) = host_and_port(url);
    connect(host, port, to, (url.scheme() == "https").then_some(trust))
}

/// Connects through a proxy, which resolves the name itself. `trust` is for the proxy's own certificate too.
pub async fn connect_through(
    proxy: &Proxy,
    host: &str,
    port: u16,
    to: Option<SocketAddr>,
    (tls, trust): (bool, &Trust),
) -> io::Result<Stream> {
    let target = to.map_or_else(|| authority(host, port), |addr| addr.to_string());
    let connecting = async {
        let tunnel = proxy.tunnel(&target, trust).await?;
        if !tls {
            return Ok(tunnel);
        }
        let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
        Ok(Stream::Tunnelled(Box::new(trust.connector()?.connect(name, tunnel).await?)))
    };
    in_time(&format!("no connection through the proxy {proxy} within 10 s"), connecting).await
}

async fn connect_directly(host: &str, port: u16, to: &[SocketAddr], tls: Option<&Trust>) -> io::Result<Stream> {
    let tcp = if to.is_empty() { dial_name(host, port).await? } else { dial(to.to_vec()).await? };
    tcp.set_nodelay(true)?;
    let Some(trust) = tls else { return Ok(Stream::Plain(tcp)) };
    let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
    Ok(Stream::Tls(Box::new(trust.connector()?.connect(name, tcp).await?)))
}

async fn in_time(late: &str, connecting: impl Future<Output = io::Result<Stream>>) -> io::Result<Stream> {
    let connected = tokio::time::timeout(CONNECT_TIMEOUT, connecting).await;
    connected.unwrap_or_else(|_| Err(io::Error::new(io::ErrorKind::TimedOut, late)))
}

/// Returns a URL's host without brackets, which is empty if there is none, and its port.
pub fn host_and_port(url: &Url) -> (&str, u16) {
    let host = url.host_str().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
    (host, url.port_or_known_default().unwrap_or(80))
}

/// Formats `host:port` as in a URL.
pub fn authority(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

impl Stream {
    /// Returns the underlying TCP socket.
    pub fn tcp(&self) -> &TcpStream {
        match self {
            Self::Plain(tcp) => tcp,
            Self::Tls(tls) => tls.get_ref().0,
            Self::Tunnelled(tls) => tls.get_ref().0.tcp(),
        }
    }
}

/// The network, which a simulation replaces: the feature `simulation` substitutes turmoil's network for the kernel's;
/// all other code is the production code.
#[cfg(not(feature = "simulation"))]
mod network {
    use std::io;
    use std::net::SocketAddr;
    use std::time::Duration;

    use futures_util::StreamExt;
    use futures_util::stream::FuturesUnordered;
    pub use tokio::net::TcpStream;

    /// The time after which the next address is tried in parallel (RFC 8305, section 5).
    const NEXT_ADDRESS_AFTER: Duration = Duration::from_millis(250);

    /// Connects to an address of a name.
    pub(super) async fn dial_name(host: &str, port: u16) -> io::Result<TcpStream> {
        dial(look_up(host, port).await?).await
    }

    /// Connects to the address that responds first (Happy Eyeballs, RFC 8305): a dead address, which is common for
    /// names on a network without working IPv6, causes a delay of only a quarter of a second. The kernel monitors
    /// whether the peer is alive.
    pub(super) async fn dial(addresses: Vec<SocketAddr>) -> io::Result<TcpStream> {
        let mut waiting = alternating(addresses).into_iter();
        let mut attempts = FuturesUnordered::new();
        let mut last = io::Error::new(io::ErrorKind::NotFound, "the name resolves to no address");
        loop {
            match waiting.next() {
                Some(address) => attempts.push(TcpStream::connect(address)),
                None if attempts.is_empty() => return Err(last),
                None => {}
            }
            tokio::select! {
                Some(attempt) = attempts.next() => match attempt {
                    Ok(stream) => {
                        modelrelay_platform::sockets::watch_peer(&socket2::SockRef::from(&stream));
                        return Ok(stream);
                    }
                    Err(error) => last = error,
                },
                () = tokio::time::sleep(NEXT_ADDRESS_AFTER), if waiting.len() > 0 => {}
            }
        }
    }

    /// Returns the addresses with both families alternating, starting with that of the first; within a family the
    /// resolver's order is kept.
    pub(super) fn alternating(addresses: Vec<SocketAddr>) -> Vec<SocketAddr> {
        let first_is_v6 = addresses.first().is_some_and(SocketAddr::is_ipv6);
        let (first, second): (Vec<_>, Vec<_>) =
            addresses.into_iter().partition(|address| address.is_ipv6() == first_is_v6);
        let (mut first, mut second) = (first.into_iter(), second.into_iter());
        let mut all = Vec::new();
        loop {
            let pair = [first.next(), second.next()];
            if pair == [None, None] {
                return all;
            }
            all.extend(pair.into_iter().flatten());
        }
    }

    /// Returns every address of a name.
    pub async fn look_up(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
        Ok(tokio::net::lookup_host((host, port)).await?.collect())
    }

    /// A cancel must not queue behind megabytes in the kernel. Not every system supports the option.
    #[cfg(unix)]
    pub fn tune_for_relay(stream: &TcpStream) {
        use modelrelay_protocol::limits::NOTSENT_LOWAT_BYTES;

        let _ = socket2::SockRef::from(stream).set_tcp_notsent_lowat(NOTSENT_LOWAT_BYTES);
    }

    /// Windows does not support the option.
    #[cfg(not(unix))]
    pub fn tune_for_relay(_: &TcpStream) {}
}

#[cfg(feature = "simulation")]
mod network {
    use std::io;
    use std::net::SocketAddr;

    pub use turmoil::net::TcpStream;

    /// Connects to the first of these addresses that accepts.
    pub(super) async fn dial(addresses: Vec<SocketAddr>) -> io::Result<TcpStream> {
        let mut last = io::Error::new(io::ErrorKind::NotFound, "no address");
        for address in addresses {
            match TcpStream::connect(address).await {
                Ok(stream) => return Ok(stream),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// Connects to the host of that name.
    pub(super) async fn dial_name(host: &str, port: u16) -> io::Result<TcpStream> {
        TcpStream::connect((host, port)).await
    }

    /// Returns the hosts of that name: `relay` matches `relay-0`, `relay-1` and so on, like a headless Service.
    // Async like its counterpart.
    #[allow(clippy::unused_async)]
    pub async fn look_up(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
        let name = regex::Regex::new(&format!("^{}(-[0-9]+)?$", regex::escape(host))).map_err(io::Error::other)?;
        Ok(turmoil::lookup_many(name).into_iter().map(|address| SocketAddr::new(address, port)).collect())
    }

    /// There is no kernel to configure.
    pub fn tune_for_relay(_stream: &TcpStream) {}
}

impl AsyncRead for Stream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(tcp) => Pin::new(tcp).poll_read(cx, buf),
            Self::Tls(tls) => Pin::new(tls).poll_read(cx, buf),
            Self::Tunnelled(tls) => Pin::new(tls).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(tcp) => Pin::new(tcp).poll_write(cx, buf),
            Self::Tls(tls) => Pin::new(tls).poll_write(cx, buf),
            Self::Tunnelled(tls) => Pin::new(tls).poll_write(cx, buf),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(tcp) => Pin::new(tcp).poll_write_vectored(cx, bufs),
            Self::Tls(tls) => Pin::new(tls).poll_write_vectored(cx, bufs),
            Self::Tunnelled(tls) => Pin::new(tls).poll_write_vectored(cx, bufs),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Plain(tcp) => tcp.is_write_vectored(),
            Self::Tls(tls) => tls.is_write_vectored(),
            Self::Tunnelled(tls) => tls.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(tcp) => Pin::new(tcp).poll_flush(cx),
            Self::Tls(tls) => Pin::new(tls).poll_flush(cx),
            Self::Tunnelled(tls) => Pin::new(tls).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(tcp) => Pin::new(tcp).poll_shutdown(cx),
            Self::Tls(tls) => Pin::new(tls).poll_shutdown(cx),
            Self::Tunnelled(tls) => Pin::new(tls).poll_shutdown(cx),
        }
    }
}

#[cfg(all(test, not(feature = "simulation")))]
mod tests {
    use super::network::alternating;

    #[test]
    fn address_families_alternate() {
        let turns = |addresses: &[&str]| {
            let addresses = addresses.iter().map(|address| format!("{address}:80").parse().unwrap()).collect();
            alternating(addresses).iter().map(|address| address.ip().to_string()).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(turns(&["[::1]", "[::2]", "127.0.0.1"]), "::1 127.0.0.1 ::2");
        assert_eq!(turns(&["10.0.0.1", "10.0.0.2", "[::1]"]), "10.0.0.1 ::1 10.0.0.2");
        assert_eq!(turns(&[]), "");
    }
}
