-- Precedes each script except a claim: no script reads or changes the index of another owner, another
-- installation or another state topic, or reads one that went back in time. Returns 'FENCED', or 'GAP' with
-- the offset of the checkpoint and the expected one. Then nothing has changed.
local known = redis.call('HMGET', KEYS[1], 'offset', 'owner', 'installation', 'topic')
if known[1] or known[2] then
  if known[3] ~= installation or known[4] ~= topic or owner ~= '' and known[2] ~= owner then
    return {'FENCED'}
  end
end
if expected ~= '' and (not known[1] or tonumber(known[1]) < tonumber(expected)) then
  return {'GAP', known[1], expected}
end

