"""What tests share: servers, clients, scripted engines, laws; no test is here."""
