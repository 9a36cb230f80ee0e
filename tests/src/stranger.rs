//! A client that believes every server, shows whatever certificate it was given, or none, and says what came of it.

use rustls::{
    ClientConfig, DigitallySignedStruct, Error, SignatureScheme,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime, pem::PemObject as _},
};
use std::{io, sync::Arc, time::Duration};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};
use tokio_rustls::{TlsConnector, client::TlsStream};

/// Longest time for a server to make up its mind.
const ANSWER: Duration = Duration::from_secs(10);
/// What a client of HTTP/2 says first: the preface, and settings.
pub const HELLO: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00";

/// What a server did with the stranger.
#[derive(Debug)]
pub struct Met {
    /// The certificate that the server showed, if it came so far.
    pub shown: Option<Vec<u8>>,
    /// Its first bytes inside, or the reason for which it hung up.
    pub answer: Result<Vec<u8>, String>,
}

/// How a client that believes everybody shows the certificate and key of this PEM text, or none.
///
/// # Panics
/// If the text holds no credentials.
#[must_use]
pub fn showing(pem: Option<&str>) -> TlsConnector {
    let provider = Arc::new(ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .expect("ring speaks TLS 1.3")
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Credulous));
    let mut config = match pem {
        None => config.with_no_client_auth(),
        Some(pem) => {
            let chain = CertificateDer::pem_slice_iter(pem.as_bytes()).collect::<Result<_, _>>().expect("certificates");
            let key = PrivateKeyDer::from_pem_slice(pem.as_bytes()).expect("a key");
            config.with_client_auth_cert(chain, key).expect("they belong together")
        }
    };
    config.alpn_protocols = vec![b"h2".to_vec()];
    TlsConnector::from(Arc::new(config))
}

async fn reach(address: &str, client: &TlsConnector) -> io::Result<TlsStream<TcpStream>> {
    let name = ServerName::try_from("stranger").expect("a name");
    client.connect(name, TcpStream::connect(address).await?).await
}

/// Connects to the server at `address` and says `words`.
///
/// # Errors
/// If the server hangs up.
pub async fn say(address: &str, client: &TlsConnector, words: &[u8]) -> io::Result<TlsStream<TcpStream>> {
    let mut stream = reach(address, client).await?;
    stream.write_all(words).await?;
    stream.flush().await?;
    Ok(stream)
}

/// Meets the server at `address` with the certificate and key of this PEM text, or with none.
///
/// # Panics
/// If the text holds no credentials, or the server neither answers nor hangs up.
pub async fn meet(address: &str, pem: Option<&str>) -> Met {
    let client = showing(pem);
    let met = async {
        let mut stream = match reach(address, &client).await {
            Ok(stream) => stream,
            Err(error) => return Met { shown: None, answer: Err(error.to_string()) },
        };
        let shown = stream.get_ref().1.peer_certificates().and_then(|chain| chain.first()).map(|it| it.to_vec());
        // A server that hangs up may do so while this is under way: the reading says why.
        drop(stream.write_all(HELLO).await);
        drop(stream.flush().await);
        let mut first = vec![0; 64];
        let answer = match stream.read(&mut first).await {
            Ok(0) => Err("closed".to_owned()),
            Ok(length) => Ok(first[..length].to_vec()),
            Err(error) => Err(error.to_string()),
        };
        Met { shown, answer }
    };
    timeout(ANSWER, met).await.expect("a server answers or hangs up")
}

/// Believes everything.
#[derive(Debug)]
struct Credulous;

impl ServerCertVerifier for Credulous {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        ring::default_provider().signature_verification_algorithms.supported_schemes()
    }
}
