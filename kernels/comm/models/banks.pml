/*
 * Arrival flags, epochs and banks: two rail peers run launch after launch, as skewed as the protocol lets them, over a
 * network that delivers in any order. README.md maps the steps to the code.
 *
 * Scaled down: epochs go round modulo 16, so that the model runs for ever and the wrap is in it; an immediate carries 3
 * bits of the epoch; a bank has two chunks, each in a granule of its own, and a launch uses one or both of them; idle
 * granules are refreshed every 2 epochs, a quarter of what an immediate tells apart, as in the code.
 *
 * -DORDERED: the fabric writes the flag itself, behind the payload (verbs, loopback). Otherwise the receiving proxy
 * rebuilds it from the immediate (ofi).
 * -DONE_BANK: banks = 1, and a release flag that says when it may be filled again. With two banks there is none: a rank
 * in launch e has received what its peer sent in e - 1, thus after the peer had ended e - 2.
 * -DM_...: mutants, each of which must fail (models.txt).
 */
#define FULL 16 /* epochs; in the code 2^32 */
#define IMM 8   /* of an immediate; in the code 2^10 */
#ifdef ONE_BANK
#define BANKS 1
#else
#define BANKS 2
#endif
#ifdef M_REFRESH_TOO_RARE
#define REFRESH (4 / BANKS)
#else
#define REFRESH (2 / BANKS) /* in uses of a bank; in the code 128 */
#endif

#define PLUS(e, n) (((e) + FULL + (n)) % FULL)
#ifdef M_COMPARE_WITHOUT_WRAP
#define REACHED(a, b) ((a) >= (b))
#else
#define REACHED(a, b) (((a) + FULL - (b)) % FULL < FULL / 2) /* epoch_reached() */
#endif
#define BANK(e) ((e) % BANKS)                                /* bank_of() */
#ifdef M_NO_REFRESH
#define REFRESH_DUE(e) false
#else
#define REFRESH_DUE(e) (((e) / BANKS) % REFRESH == 0)        /* refresh_due() */
#endif

/* Flags of a rank, and what is on its way to them: the arrivals, then with one bank the release. */
#define ARRIVALS (2 * BANKS)
#define ARRIVAL(bank, chunk) ((bank) * 2 + (chunk))
#ifdef ONE_BANK
#define RELEASE ARRIVALS
#define FLAGS (ARRIVALS + 1)
/* The release is in chunk 0's granule, and they overtake each other, as several peers' releases do in the code. */
#define GRANULE(flag) ((flag) % ARRIVALS)
#else
#define FLAGS ARRIVALS
#define GRANULE(flag) (flag)
#endif

byte flag[2 * FLAGS] = 0;    /* [rank][flag] */
byte last[2 * ARRIVALS] = 0; /* ArrivalBoard::granules_ */

#define SPENT FULL /* nobody may read it: of no epoch, so that there are fewer states */
byte staging[2 * ARRIVALS] = SPENT;  /* [rank][bank][chunk]: the epoch whose sum lies there */
byte received[2 * ARRIVALS] = SPENT; /* likewise: what lies in the receive banks */

/* A message to a flag of a rank. One flag has at most one on its way: asserted. */
#define NOTHING 0
#define POSTED 1 /* the source may still be read */
#define LANDED 2 /* the payload is there, or there is none; the flag is not shown */
#ifdef M_FLAG_BEFORE_PAYLOAD
#define WITHOUT_PAYLOAD POSTED
#else
#define WITHOUT_PAYLOAD LANDED
#endif
byte stage[2 * FLAGS] = NOTHING;
byte carries[2 * FLAGS] = 0; /* its epoch */

byte launch[2] = 1;       /* the launch each rank is in */
byte received_all[2] = 0; /* the last launch of which its receive blocks have read everything */
byte wide[4] = 0;         /* chunks of the launches under way (all ranks agree on m); 0: nobody has begun it */

#define MINE(f) (me * FLAGS + (f))
#define PEER(f) ((1 - me) * FLAGS + (f))
#define PLACE(rank, bank, chunk) ((rank) * ARRIVALS + ARRIVAL(bank, chunk))

inline post(f, first_stage) {
  assert(stage[PEER(f)] == NOTHING); /* "the values of one flag arrive in order on any network" */
  stage[PEER(f)] = first_stage;
  carries[PEER(f)] = e
}

/* What the end of a launch, and with one bank its release, comes after. */
#define ARRIVED(chunk) REACHED(flag[MINE(ARRIVAL(BANK(e), chunk))], e)
#define READ (received_all[me] == e)
#ifdef M_ENDS_BEFORE_REFRESH_ARRIVED
#define REFRESHED true
#else
#define REFRESHED (wide[e % 4] == 2 || !REFRESH_DUE(e) || ARRIVED(1))
#endif
#ifdef M_RELEASES_BEFORE_READ
#define MAY_RELEASE REFRESHED
#else
#define MAY_RELEASE (READ && REFRESHED)
#endif
#if defined(M_ENDS_UNHEARD) /* rank 0 reads nothing, and does not wait for what rank 1 sends */
#define MAY_END (me == 0 || (READ && REFRESHED))
#elif defined(M_ENDS_BEFORE_READ)
#define MAY_END (ARRIVED(0) && (wide[e % 4] != 2 || ARRIVED(1)) && REFRESHED)
#else
#define MAY_END (READ && REFRESHED)
#endif

/* The compute, reduce and send blocks of one rank. */
proctype sender(byte me) {
  byte e = 1;
  do
  :: atomic {
      /* A launch ends with what the peer sent in its own: ranks are in the same one, or in neighbours. */
      assert((e + FULL + 1 - launch[1 - me]) % FULL <= 2);
      if
      :: wide[e % 4] == 0 -> if :: wide[e % 4] = 1 :: wide[e % 4] = 2 fi
      :: else
      fi
    };
#ifndef M_NO_STAGING_WAIT
    /* await_staging_free(): the daemon has read what the bank's last launch sent. */
    stage[PEER(ARRIVAL(BANK(e), 0))] != POSTED && stage[PEER(ARRIVAL(BANK(e), 1))] != POSTED;
#endif
    atomic {
      staging[PLACE(me, BANK(e), 0)] = e;
      staging[PLACE(me, BANK(e), 1)] = (wide[e % 4] == 2 -> e : SPENT)
    };
#if defined(ONE_BANK) && !defined(M_NO_RELEASES)
    /* await_release() */
#ifdef M_RELEASE_WAIT_ONE_USE_TOO_OLD
    REACHED(flag[MINE(RELEASE)], PLUS(e, -2));
#else
    REACHED(flag[MINE(RELEASE)], PLUS(e, -1));
#endif
#endif
    atomic { /* in one step, since the network has its own order */
      post(ARRIVAL(BANK(e), 0), POSTED);
      if
      :: wide[e % 4] == 2 -> post(ARRIVAL(BANK(e), 1), POSTED)
      :: wide[e % 4] != 2 && REFRESH_DUE(e) -> post(ARRIVAL(BANK(e), 1), WITHOUT_PAYLOAD)
      :: else
      fi
    };
    /* end_exchange() */
#if defined(ONE_BANK) && !defined(M_NO_RELEASES)
    MAY_RELEASE;
#ifndef M_RELEASE_FORGOTTEN
    atomic { post(RELEASE, LANDED) };
#endif
#endif
    MAY_END; /* the next launch begins after all blocks */
progress_launched:
    atomic {
      if
      :: launch[1 - me] == e
      :: else -> wide[e % 4] = 0 /* the last rank to leave it */
      fi;
      e = PLUS(e, 1);
      launch[me] = e
    }
  od
}

/* Its receive blocks: sees a chunk at any time after its arrival. */
#define READS(chunk) \
  staging[PLACE(me, BANK(e), chunk)] == e && ARRIVED(chunk); /* await_chunk_reduced(), await_arrival() */ \
  assert(received[PLACE(me, BANK(e), chunk)] == e && staging[PLACE(me, BANK(e), chunk)] == e); \
  received[PLACE(me, BANK(e), chunk)] = SPENT

proctype receiver(byte me) {
  byte e = 1;
  do
  :: atomic { READS(0) };
    atomic {
      if
#ifndef M_ENDS_ONCE_HEARD /* by its first chunk; the rest is not awaited */
      :: wide[e % 4] == 2 -> READS(1)
#endif
      :: else
      fi;
      received_all[me] = e;
      e = PLUS(e, 1)
    }
  od
}

/* The bytes of the message to flag f of rank `to` are all there. */
inline land(to, f) {
  received[to * ARRIVALS + f] = staging[(1 - to) * ARRIVALS + f]
}

/* Its flag is shown. */
inline publish(to, f) {
  value = carries[to * FLAGS + f];
#ifdef ORDERED
  assert(REACHED(value, flag[to * FLAGS + f])); /* "it never goes back" */
  flag[to * FLAGS + f] = value;
#else
  /* immediate_epoch() */
  granule = to * ARRIVALS + GRANULE(f);
  ahead = (value % IMM + IMM - last[granule] % IMM) % IMM;
#ifdef M_IMMEDIATE_ALWAYS_AHEAD
  rebuilt = PLUS(last[granule], ahead);
#else
  rebuilt = (ahead < IMM / 2 -> PLUS(last[granule], ahead) : PLUS(last[granule], ahead - IMM));
#endif
  assert(rebuilt == value);
  /* ArrivalBoard::publish() */
  if :: REACHED(rebuilt, last[granule]) -> last[granule] = rebuilt :: else fi;
  if :: !REACHED(flag[to * FLAGS + f], rebuilt) -> flag[to * FLAGS + f] = rebuilt :: else fi;
  granule = 0; ahead = 0; rebuilt = 0;
#endif
  value = 0
}

inline forget(to, f) {
  stage[to * FLAGS + f] = NOTHING;
  carries[to * FLAGS + f] = 0
}

#ifdef M_FLAG_BEFORE_PAYLOAD
#define FIRST publish
#define THEN land
#else
#define FIRST land
#define THEN publish
#endif
#define DELIVERS(f) \
  :: atomic { stage[to * FLAGS + f] == POSTED -> FIRST(to, f); stage[to * FLAGS + f] = LANDED } \
  :: atomic { stage[to * FLAGS + f] == LANDED -> THEN(to, f); forget(to, f) }
#define SHOWS(f) \
  :: atomic { stage[to * FLAGS + f] == LANDED -> publish(to, f); forget(to, f) }

/* All messages to one rank, each in its own time. */
proctype network(byte to) {
  byte value, granule, ahead, rebuilt;
end:
  do
  DELIVERS(0)
  DELIVERS(1)
#ifdef ONE_BANK
  SHOWS(RELEASE)
#else
  DELIVERS(2)
  DELIVERS(3)
#endif
  od
}

init {
  atomic {
    run sender(0); run network(0);
#ifndef M_ENDS_UNHEARD
    run receiver(0);
#endif
    run sender(1); run receiver(1); run network(1)
  }
}
